"""The package as it is installed."""

import inspect
import pathlib

import fovea
from fovea import _core


def test_everything_public_is_documented():
    for name in fovea.__all__:
        assert inspect.getdoc(getattr(fovea, name)), name


def test_type_stubs_name_everything():
    folder = pathlib.Path(_core.__file__).parent
    assert (folder / "py.typed").exists()
    stub = (folder / "_core.pyi").read_text()
    for name in dir(_core):
        if not name.startswith("_"):
            assert f"class {name}" in stub or f"def {name}(" in stub, name


def test_extension_needs_no_library_of_its_own_and_is_small():
    assert pathlib.Path(_core.__file__).stat().st_size < 30 << 20
