"""``vllm-mtp options``: the option table of the README, from the model itself."""

import typer

from vllm_mtp.config import MTPPlusConfig, allowed_values


def option_table() -> str:
    """All options of ``mtp_plus`` as a Markdown table."""
    rows = ["| option | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    for name, field in MTPPlusConfig.model_fields.items():
        default = "unset" if field.default is None else repr(field.default)
        rows.append(
            f"| `{name}` | {default} | {allowed_values(name)} | {field.description} |"
        )
    return "\n".join(rows) + "\n"


def options() -> None:
    """Print every option with its default, range and meaning."""
    typer.echo(option_table(), nl=False)
