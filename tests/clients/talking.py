"""How programs beside this file are run, with clients that the tests' own environment has not.

`make test-clients` puts them into .venv/clients (or the folder that PAGED_CLIENTS names): a Python
environment with node_modules beside it.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CLIENTS = Path(os.getenv("PAGED_CLIENTS", HERE.parents[1] / ".venv/clients"))
PYTHON, NODE = CLIENTS / "bin/python", shutil.which("node")

needs_python = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"{PYTHON} is not there: make test-clients installs it"
)
needs_node = pytest.mark.skipif(
    NODE is None or not (CLIENTS / "node_modules/openai").exists(),
    reason="no node, or no client for it: make test-clients installs the client",
)

# No model, price list or statistics is fetched or sent.
_QUIET = {
    "ANONYMIZED_TELEMETRY": "false",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NODE_PATH": str(CLIENTS / "node_modules"),
    "OPENAI_API_KEY": "any",
    "PYTHONPATH": "",
}


def talk(cwd: Path, script: str, *args: str) -> str:
    """What a program prints, which must end well."""
    interpreter = NODE if script.endswith(".cjs") else PYTHON
    done = subprocess.run(
        [str(interpreter), str(HERE / script), *args],
        env=os.environ | _QUIET,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
