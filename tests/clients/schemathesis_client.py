"""Schemathesis: python schemathesis_client.py URL.

All it checks but one: fields exclude each other in ways that a schema does not say, so that not
every body that keeps to it is accepted.
"""

import sys

from schemathesis.cli import schemathesis

[url] = sys.argv[1:]
HOW = "--seed 1 --max-examples 30 --no-color --exclude-checks positive_data_acceptance"
schemathesis(["run", f"{url}/openapi.json", *HOW.split()])
