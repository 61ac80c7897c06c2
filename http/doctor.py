"""`paged doctor`: is this machine ready for `paged serve` with the same flags?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

import jax

from paged.http.entries import chat_template
from paged.http.listener import bound
from paged.http.options import DoctorOptions, ModelOptions, ServeOptions
from paged.http.serve import check_doors, with_key
from paged.runtime.config import EngineConfig
from paged.runtime.doctor.finding import Finding, any_wrong, as_json, ok, report, wrong
from paged.runtime.doctor.gpus import (
    Ask,
    ask_nvidia_smi,
    cards,
    check_driver,
    check_memory,
    check_visibility,
)
from paged.runtime.doctor.jax_install import check_device, check_environment, check_jax
from paged.runtime.doctor.machine import check_machine
from paged.runtime.doctor.model import check_model
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags


def run(args: argparse.Namespace) -> int:
    """Look at everything and say it; the exit status is 1 if something is wrong.

    Raises:
        ConfigError: the flags do not go together.
    """
    jax.config.update("jax_platforms", "cpu")  # what is looked at here takes no GPU's memory
    config, options = read_flags(EngineConfig, args), with_key(read_flags(ServeOptions, args))
    template = chat_template(read_flags(ModelOptions, args))
    findings = [*examine(config, options, template, ask_nvidia_smi)]
    if read_flags(DoctorOptions, args).json:
        sys.stdout.write(f"{json.dumps(as_json(findings), indent=2)}\n")
    else:
        sys.stdout.write(f"{report(findings)}\n")
    return int(any_wrong(findings))


def examine(
    config: EngineConfig, options: ServeOptions, template: str | None, ask: Ask
) -> Iterator[Finding]:
    """Every check, in the order in which a start would run into them.

    Args:
        template: for chats, in place of the model's own.
        ask: of the driver.
    """
    found = cards(ask)
    yield from check_driver(found)
    yield from check_visibility(found, config)
    yield from check_memory(found, config, ask)
    yield from check_jax(found)
    yield from check_environment(found)
    yield from check_device(found)
    yield from check_model(config, template, found)
    yield from check_machine(config)
    yield check_keys(options)
    yield check_port(options)


def check_keys(options: ServeOptions) -> Finding:
    """Whether the files of API keys and certificates can be used."""
    try:
        check_doors(options)
    except ConfigError as error:
        return wrong("keys", str(error), "Put the file right, or leave its flag out.")
    has_keys = options.api_key or options.api_keys_file
    who = "those who have an API key" if has_keys else "everyone who reaches it"
    return ok("keys", f"{who} may ask, by {'https' if options.ssl_certfile else 'http'}")


def check_port(options: ServeOptions) -> Finding:
    """Whether the server could listen."""
    where = f"--uds {options.uds}" if options.uds else f"{options.host} port {options.port}"
    try:
        with bound(options):
            return ok("port", f"{where} is free")
    except ConfigError as error:
        remedy = "If another program has it, `ss -ltnp` names that; else give another --host."
        return wrong("port", str(error), remedy)
