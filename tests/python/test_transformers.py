"""Tiny random models of transformers generate the same tokens with fovea as with eager."""

import copy
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers  # noqa: E402

import fovea.transformers  # noqa: E402

STEPS = 10

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "parity"))
import record  # noqa: E402

NAMES = ["gpt_oss", "llama3", "qwen3", "gemma3", "qwen2", "mistral", "deepseek_v2",
         "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite", "minicpm3_short"]


@pytest.fixture(scope="module")
def makers():
    transformers.logging.set_verbosity_error()
    return {name: (config, kind) for name, config, kind, _, _ in record.models()}


def make(makers, name, implementation):
    config, kind = makers[name]
    config._attn_implementation = "eager"
    model = kind(config).eval()
    record.randomise(model, torch.Generator().manual_seed(3))
    model.set_attn_implementation(implementation)
    return model


def generate(model, tokens, attention_mask, **options):
    with torch.no_grad():
        return model.generate(tokens, attention_mask=attention_mask, max_new_tokens=STEPS,
                              min_new_tokens=STEPS, do_sample=False, pad_token_id=0,
                              output_logits=True, return_dict_in_generate=True, **options)


def prompts(vocab, padding):
    tokens = torch.randint(1, vocab, (3, 40), generator=torch.Generator().manual_seed(1))
    attention_mask = torch.ones_like(tokens)
    for row, count in enumerate(padding):
        attention_mask[row, :count] = 0
    return tokens, attention_mask


def assert_same(expected, got):
    for step, (a, b) in enumerate(zip(expected.logits, got.logits)):
        error = ((a - b).norm(dim=-1) / a.norm(dim=-1)).max().item()
        assert error < 1e-3, f"step {step}: logits off by {error:.2e} of their norm"
    assert torch.equal(expected.sequences, got.sequences)


@pytest.mark.parametrize("name, padding", [(name, (7, 0, 39)) for name in NAMES] + [
    ("gemma3", (0, 0, 0)), ("glm4_moe_lite", (0, 0, 0))])
def test_generate(makers, name, padding):
    eager, ours = (make(makers, name, kind) for kind in ("eager", "fovea"))
    batch = prompts(eager.config.vocab_size, padding)
    assert_same(generate(eager, *batch), generate(ours, *batch))


def test_latents_are_cached_and_read_as_they_are(makers, monkeypatch):
    model = make(makers, "deepseek_v3", "fovea")
    batch = prompts(model.config.vocab_size, (0, 3, 0))
    generate(model, *batch)  # From here on the class keeps latents.
    absorbed = []
    decode = fovea.transformers.mla_decode
    monkeypatch.setattr(fovea.transformers, "mla_decode",
                        lambda *a, **k: absorbed.append(a[2]) or decode(*a, **k))
    cache = generate(model, *batch).past_key_values
    assert len(absorbed) == 3 * (STEPS - 1)  # Layers and decodes.
    for layer in cache.layers:
        assert type(layer) is fovea.transformers.LatentLayer
        assert layer.cache.rows.format.row_elements == 48
        assert layer.get_seq_length() == 40 + STEPS - 1
        assert [len(sequence) for sequence in layer.sequences] == [49, 46, 49]  # No padding.
    assert absorbed[-1] is cache.layers[-1].cache


def test_latents_outgrow_their_blocks(makers):
    eager, ours = (make(makers, "deepseek_v2", kind) for kind in ("eager", "fovea"))
    tokens = torch.randint(1, eager.config.vocab_size, (2, 30),
                           generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        caches = [model(tokens).past_key_values for model in (eager, ours)]
        before = caches[1].layers[-1].cache.num_blocks
        for length in (17, 300, 3, 500, 1):  # Expanded and absorbed over what is there.
            tokens = torch.randint(1, eager.config.vocab_size, (2, length),
                                   generator=torch.Generator().manual_seed(length))
            a, b = (model(tokens, past_key_values=cache).logits
                    for model, cache in zip((eager, ours), caches))
            assert ((a - b).norm(dim=-1) / a.norm(dim=-1)).max() < 1e-3
    assert caches[1].layers[-1].cache.num_blocks > before


def test_latent_layers_follow_the_batch():
    layer = fovea.transformers.LatentLayer()
    rows = torch.arange(3 * 4 * 6, dtype=torch.float32).view(3, 1, 4, 6)
    layer.update(rows[..., :4], rows[..., 4:])
    layer.store([slice(1, 4), slice(0, 4), slice(2, 4)])
    layer.reorder_cache(torch.tensor([2, 1, 1]))
    layer.crop(-1)
    layer.update(rows[:, :, :1, :4], rows[:, :, :1, 4:])
    with pytest.raises(NotImplementedError, match="attention_mask says of sequence 0"):
        layer.store([slice(1, 4), slice(0, 4), slice(0, 4)])
    layer.update(rows[:, :, :1, :4], rows[:, :, :1, 4:])  # The refused one counts for nothing.
    layer.store([slice(2, 4), slice(0, 4), slice(0, 4)])
    layer.batch_select_indices(torch.tensor([0, 2]))
    layer.batch_repeat_interleave(2)
    for _ in range(100):  # Beams that go away leave their blocks.
        layer.reorder_cache(torch.arange(4))
    assert layer.cache.pool.ref_count(layer.sequences[0].blocks[0]) == 2
    assert [len(sequence) for sequence in layer.sequences] == [2, 2, 4, 4]
    for row, want in ((0, [rows[2, 0, 2], rows[0, 0, 0]]),
                      (3, [rows[1, 0, 0], rows[1, 0, 1], rows[1, 0, 2], rows[2, 0, 0]])):
        assert torch.equal(torch.cat(layer.latents(row), dim=3)[0, 0], torch.stack(want))
    twin = copy.deepcopy(layer)
    layer.crop(-3)
    assert [len(sequence) for sequence in layer.sequences] == [0, 0, 1, 1]
    assert torch.equal(torch.cat(twin.latents(3), dim=3)[0, 0], torch.stack(want))
    layer.reset()
    assert layer.get_seq_length() == 0
    layer.reorder_cache(torch.tensor([1, 0]))
    layer.update(rows[..., :4].half(), rows[..., 4:].half())
    layer.store([slice(0, 4)] * 3)
    with pytest.raises(ValueError, match="the batch has 2 sequences; the cache holds 3"):
        layer.update(rows[:2, ..., :4].half(), rows[:2, ..., 4:].half())
        layer.store([slice(0, 8)] * 2)


def test_padding_behind_tokens_is_cropped_first():
    layer = fovea.transformers.LatentLayer()
    rows = torch.arange(2 * 6 * 6, dtype=torch.float32).view(2, 1, 6, 6)
    layer.update(rows[..., :4], rows[..., 4:])
    layer.store([slice(0, 3), slice(0, 6)])
    layer.crop(-2)
    assert [len(sequence) for sequence in layer.sequences] == [3, 4]


def test_what_is_more_than_a_product_is_expanded(makers):
    eager, ours = (make(makers, "deepseek_v2", kind) for kind in ("eager", "fovea"))
    batch = prompts(eager.config.vocab_size, (0, 3, 0))
    generate(ours, *batch)  # From here on the class keeps latents.
    for model in (eager, ours):
        for module in model.modules():
            if hasattr(module, "kv_b_proj"):
                module.kv_b_proj.register_forward_hook(lambda module, _, out: out * 1.5)
    assert_same(generate(eager, *batch), generate(ours, *batch))


def test_other_implementations_do_not_go_on_with_a_latent_cache(makers):
    model = make(makers, "deepseek_v2", "fovea")
    batch = prompts(model.config.vocab_size, (0, 3, 0))
    cache = generate(model, *batch).past_key_values
    cache = generate(model, *batch).past_key_values
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), pytest.raises(NotImplementedError, match="start with a new cache"):
        model(batch[0][:, :1], past_key_values=cache)


def test_beams_reorder_latents(makers):
    eager, ours = (make(makers, "deepseek_v2", kind) for kind in ("eager", "fovea"))
    batch = prompts(eager.config.vocab_size, (0, 3, 0))
    with torch.no_grad():
        expected, got = (model.generate(batch[0], attention_mask=batch[1], max_new_tokens=8,
                                        num_beams=3, do_sample=False, pad_token_id=0)
                         for model in (eager, ours))
    assert torch.equal(expected, got)


def test_static_caches(makers):
    eager, ours = (make(makers, "llama3", kind) for kind in ("eager", "fovea"))
    batch = prompts(eager.config.vocab_size, (2, 0, 5))
    assert_same(generate(eager, *batch),
                generate(ours, *batch, cache_implementation="static", disable_compile=True))


def test_bfloat16(makers):
    eager, ours = (make(makers, "deepseek_v3", kind).bfloat16() for kind in ("eager", "fovea"))
    tokens, attention_mask = prompts(eager.config.vocab_size, (0, 0, 0))
    with torch.no_grad():
        a, b = (model(tokens, attention_mask=attention_mask).logits.float()
                for model in (eager, ours))
    assert ((a - b).norm(dim=-1) / a.norm(dim=-1)).median() < 0.1


def test_refusals(makers):
    model = make(makers, "llama3", "fovea")
    tokens, attention_mask = prompts(model.config.vocab_size, (0, 0, 0))
    with pytest.raises(NotImplementedError, match="gradients are asked for"):
        model(tokens)
    with torch.no_grad():
        attention_mask[1, 20] = 0
        with pytest.raises(NotImplementedError, match="attention_mask has gaps in sequence 1"):
            model(tokens, attention_mask=attention_mask)
        with pytest.raises(NotImplementedError, match=r"attention_mask has shape \(3, 1, 40, 40\)"):
            model(tokens, attention_mask=torch.ones(3, 1, 40, 40, dtype=torch.bool))
        positions = torch.cat([torch.arange(20), torch.arange(20)])[None].expand(3, -1)
        with pytest.raises(NotImplementedError, match="the mask .*packed_sequence"):
            model(tokens, position_ids=positions, use_cache=False)
