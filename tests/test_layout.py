"""One import package over four top-level folders: what must hold for that to keep working."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("models", "runtime", "http")
FOLDERS = ("paged", *LINKED)


def python(code: str) -> str:
    """Run `code` in a fresh interpreter started in the repository root; return what it printed."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_standard_http_is_not_shadowed_at_the_root() -> None:
    found = python("import http.client, urllib.request; print(http.client.__file__)")
    assert not Path(found).is_relative_to(ROOT)


def test_our_http_is_importable_as_paged_http() -> None:
    assert python("import paged.http; print(paged.http.__name__)") == "paged.http"


@pytest.mark.parametrize("module", ["paged", "paged.pool", "paged.runtime.scheduler"])
def test_host_logic_loads_no_jax(module: str) -> None:
    assert python(f"import {module}, sys; print('jax' in sys.modules)") == "False"


def test_every_name_for_users_is_there() -> None:
    missing = "[name for name in paged.__all__ if not hasattr(paged, name)]"
    assert python(f"import paged; print({missing})") == "[]"


def test_http_and_tests_are_not_regular_packages() -> None:
    """Either file would take the name `http` from the standard library."""
    assert not (ROOT / "http/__init__.py").exists()
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("name", LINKED)
def test_every_other_folder_is_a_regular_package(name: str) -> None:
    """The import rules do not look into folders without an `__init__.py`."""
    folders = {path.parent for path in (ROOT / name).rglob("*.py")} - {ROOT / "http"}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative(name: str) -> None:
    assert (ROOT / "paged" / name).readlink() == Path("..") / name


@pytest.mark.parametrize("name", LINKED)
def test_no_module_shadows_the_standard_library(name: str) -> None:
    """Python started inside the folder would find ours instead of the standard one."""
    ours = {path.stem for path in (ROOT / name).rglob("*")}
    assert ours & sys.stdlib_module_names == set()


def test_constraints_hold_exact_versions_and_no_address() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [line for line in pins if "==" not in line or "/" in line or "@" in line] == []


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what is packed, in a folder named as a clone is."""
    source = tmp_path / "paged"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    return source


def test_a_clone_is_imported_from_its_parent_folder_too(source: Path, tmp_path: Path) -> None:
    """There `paged` is the clone itself, without an `__init__.py`, as well as the package in it."""
    build = "import setuptools.build_meta; setuptools.build_meta.build_editable('..')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    code = "import site; site.addsitedir('installed'); import paged; print(paged.__file__)"
    isolated = [sys.executable, "-S", "-c", code]
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        isolated, cwd=tmp_path, env=without, check=True, capture_output=True, text=True
    )
    assert Path(done.stdout.strip()) == source / "paged/__init__.py"


@pytest.mark.slow
def test_wheel_holds_every_module(source: Path, tmp_path: Path) -> None:
    """Built by way of the source archive, as a release is."""
    build = [sys.executable, "-m", "build", "--no-isolation", f"--outdir={tmp_path}", str(source)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr

    [wheel] = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("paged/")}
    ours = [path.relative_to(source) for name in FOLDERS for path in (source / name).rglob("*.py")]
    expected = {str(path if path.parts[0] == "paged" else "paged" / path) for path in ours}
    page = {f"paged/http/static/{path.name}" for path in (ROOT / "http/static").iterdir()}
    assert packed == expected | page | {"paged/py.typed"}
