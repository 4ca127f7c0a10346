"""Applies each mutation of mutations.py to a copy of the sources and expects a test to fail.

Builds the rooms that the rules live in, with the reference backend alone, and a few test programs. For a
mutant only the objects that see the changed file are compiled again; programs run from the quickest on
until one fails.
"""
import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

from mutations import MUTATIONS

LIBRARY = [
    "src/core/*.cc", "src/quant/*.cc", "src/kv/**/*.cc", "src/plan/*.cc", "src/ops/*.cc",
    "src/backends/reference/*.cc", "src/backends/cuda_stub/*.cc", "src/oracle/*.cc",
    "src/api/runtime.cc",
    "tests/mutation/reference_only.cc",
]
LAYERS = ["src/layers/*.cc", "src/linear/*.cc"]
LEFT_OUT = ["src/linear/onednn.cc", "src/linear/openmp_thread_pool.cc",
            "src/linear/cublaslt.cc", "src/linear/cublaslt_library.cc"]
# Of the cases over backends, those of f32 and of one small dtype.
OPS_FILTER = "*reference_f32:*reference_bf16"
# From the quickest to build and run on: (name, sources, filter of cases).
PROGRAMS = [
    ("variants", ["tests/variants/visibility_test.cc"], "*"),
    ("plan", ["src/core/*.cc", "src/quant/*.cc", "src/kv/**/*.cc", "src/plan/*.cc",
              "tests/plan/*_test.cc"], "-GoldenPlans*"),
    ("ops", LIBRARY + ["tests/ops/attention_rules_test.cc", "tests/ops/gqa_attention_test.cc",
                       "tests/ops/gqa_append_test.cc", "tests/ops/merge_state_test.cc",
                       "tests/ops/mla_decode_test.cc", "tests/ops/row_ops_test.cc"], OPS_FILTER),
    ("layers", LIBRARY + LAYERS + ["src/engine/stored_row_error.cc",
                                   "tests/layers/allocations.cc",
                                   "tests/layers/attention_layer_test.cc",
                                   "tests/layers/attention_refusal_test.cc",
                                   "tests/layers/mla_dims_test.cc",
                                   "tests/layers/mla_layer_test.cc",
                                   "tests/layers/rotary_test.cc"], "*"),
]
FLAGS = ["-std=c++20", "-O1", "-w", "-ffp-contract=off", "-DFMT_HEADER_ONLY=1",
         '-DFOVEA_TEST_DATA=""']
FILE_FLAGS = {"src/linear/plain_avx2.cc": ["-mavx2", "-mfma", "-mf16c"]}
SECONDS_PER_PROGRAM = 120


class Failure(Exception):
    """Something that keeps the check from saying anything about the rules."""


class StaticAssertion(Failure):
    """A test that the compiler itself runs, and that fails."""


class Build:
    """The unchanged tree's objects, and how to make a mutant's."""

    def __init__(self, args):
        self.work = pathlib.Path(args.work).resolve()
        self.source = self.work / "tree"  # A copy: nobody changes it meanwhile.
        for folder in ("include", "src", "tests"):
            shutil.copytree(pathlib.Path(args.source) / folder, self.source / folder)
        self.compiler = ([args.launcher] if args.launcher else []) + [args.cxx]
        # Behind the compiler's own: one of these may be /usr/include itself.
        self.includes = [f"-idirafter{folder}" for folder in args.includes.split(";") if folder]
        self.libraries = args.library
        self.jobs = args.jobs
        self.dependencies = {}  # Of each source, the files of the tree that its object depends on.

    def sources_of(self, program):
        patterns = next(sources for name, sources, _ in PROGRAMS if name == program)
        paths = []
        for pattern in patterns:
            found = sorted(self.source.glob(pattern))
            if not found:
                raise Failure(f"{pattern}: no such file")
            paths += [str(path.relative_to(self.source)) for path in found]
        return [path for path in paths if path not in LEFT_OUT]

    def object_of(self, source, folder):
        return folder / (source.replace("/", ".") + ".o")

    def compile(self, source, folder, overlay=None):
        """The object of `source`; files of the folder `overlay` stand before the tree's."""
        target = self.object_of(source, folder)
        roots = ([overlay] if overlay else []) + [self.source]
        path = next(root / source for root in roots if (root / source).exists())
        includes = [f"-I{root / part}" for root in roots for part in ("include", "src", "tests")]
        command = [*self.compiler, *FLAGS, *FILE_FLAGS.get(source, []), *includes, *self.includes,
                   "-MMD", "-MF", f"{target}.d", "-c", str(path), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            kind = StaticAssertion if "static assertion failed" in done.stderr else Failure
            raise kind(f"{source} does not compile:\n{done.stderr[:2000]}")
        return target

    def link(self, program, changed, folder):
        objects = [changed.get(source) or self.object_of(source, self.work / "base")
                   for source in self.sources_of(program)]
        target = folder / program
        command = [self.compiler[-1], *map(str, objects), *self.libraries, "-pthread", "-o",
                   str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Failure(f"{program} does not link:\n{done.stderr[:2000]}")
        return target

    def run(self, program, path):
        """The name of the first case that fails; None when all pass."""
        cases = next(cases for name, _, cases in PROGRAMS if name == program)
        environment = dict(os.environ, FOVEA_BACKEND="reference")
        try:
            done = subprocess.run([str(path), f"--gtest_filter={cases}", "--gtest_fail_fast"],
                                  capture_output=True, text=True, errors="replace", check=False,
                                  env=environment, timeout=SECONDS_PER_PROGRAM)
        except subprocess.TimeoutExpired:
            return f"{program}: no end"
        if done.returncode == 0:
            if "[  PASSED  ] 0 tests" in done.stdout:
                raise Failure(f"{program} has no case that {cases} matches")
            return None
        failed = re.search(r"^\[  FAILED  \] ([^\s,]+)", done.stdout, re.MULTILINE)
        return f"{program}: {failed.group(1) if failed else 'died'}"

    def build_base(self):
        """Everything, and one run of it: on the unchanged tree all tests pass."""
        folder = self.work / "base"
        folder.mkdir(parents=True)
        sources = sorted({s for program, _, _ in PROGRAMS for s in self.sources_of(program)})
        # The large ones first, so that the last ones to finish are small.
        sources.sort(key=lambda s: -(self.source / s).stat().st_size)
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            objects = list(pool.map(lambda source: self.compile(source, folder), sources))
        for source, target in zip(sources, objects):
            text = pathlib.Path(f"{target}.d").read_text().replace("\\\n", " ")
            # Relative ones too: ccache makes paths so if it is given a base.
            files = map(os.path.abspath, text.split(":", 1)[1].split())
            self.dependencies[source] = {os.path.relpath(file, self.source) for file in files
                                         if file.startswith(str(self.source))}

        def check(program):
            failed = self.run(program, self.link(program, {}, folder))
            if failed:
                raise Failure(f"without any mutation {failed} fails")
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(check, [program for program, _, _ in PROGRAMS]))

    def who_notices(self, number, mutation):
        """The case that fails under the mutation; None when none does."""
        what, file, old, new = mutation
        text = (self.source / file).read_text()
        if text.count(old) != 1:
            raise Failure(f"'{what}': {file} holds {text.count(old)} times, not once: {old}")
        folder = self.work / f"mutant_{number}"
        changed_file = folder / "tree" / file
        changed_file.parent.mkdir(parents=True)
        changed_file.write_text(text.replace(old, new))
        changed = {}
        try:
            for program, _, _ in PROGRAMS:
                stale = [source for source in self.sources_of(program)
                         if file in self.dependencies[source]]
                if not stale:
                    continue
                for source in stale:
                    if source not in changed:
                        changed[source] = self.compile(source, folder, folder / "tree")
                failed = self.run(program, self.link(program, changed, folder))
                if failed:
                    return failed
            if not changed:
                raise Failure(f"'{what}': no program is built from {file}")
            return None
        except StaticAssertion:
            return "a static assertion"
        finally:
            shutil.rmtree(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True, help="root of the source tree")
    parser.add_argument("--work", required=True, help="scratch folder, emptied first")
    parser.add_argument("--cxx", required=True)
    parser.add_argument("--launcher", default="", help="such as ccache")
    parser.add_argument("--includes", default="", help="of other libraries, with ; between them")
    parser.add_argument("--library", action="append", default=[], help="GoogleTest and its main")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="only mutations whose description has this text")
    args = parser.parse_args()

    shutil.rmtree(args.work, ignore_errors=True)
    start = time.monotonic()
    build = Build(args)
    build.build_base()
    print(f"built in {time.monotonic() - start:.0f} s; {len(MUTATIONS)} mutations", flush=True)
    chosen = [(n, m) for n, m in enumerate(MUTATIONS) if args.only in m[0]]
    unnoticed, errors = [], []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        futures = {pool.submit(build.who_notices, n, m): m for n, m in chosen}
        for future in concurrent.futures.as_completed(futures):
            what = futures[future][0]
            try:
                noticed = future.result()
                print(f"{what}: {noticed or 'NOT NOTICED'}", flush=True)
                if not noticed:
                    unnoticed.append(what)
            except Failure as error:
                print(f"error: {error}", flush=True)
                errors.append(what)
    shutil.rmtree(args.work, ignore_errors=True)
    print(f"{len(chosen) - len(unnoticed) - len(errors)} of {len(chosen)} noticed in "
          f"{time.monotonic() - start:.0f} s")
    return 1 if unnoticed or errors or not chosen else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as error:
        sys.exit(f"error: {error}")
