"""``vllm-mtp report``: results that our commands wrote, as one page.

The page holds everything that it shows: tables, pictures (SVG), style. It loads
nothing and runs no script, so it can be mailed, attached to a pull request or printed.
The same files give the same page, byte for byte.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.errors import ConsoleError

from vllm_mtp.config import ConfigError
from vllm_mtp.tools.option_checks import refuse
from vllm_mtp.tools.provenance import replacing
from vllm_mtp.tools.report_kinds import KINDS, Kind
from vllm_mtp.tools.report_page import Section, draw_all, origin_of, render_page
from vllm_mtp.tools.report_source import (
    EVAL,
    DamagedError,
    Source,
    damaged,
    read_sources,
)

GARBLED = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    AssertionError,
    ConsoleError,  # rich: a cell that is no text
)
"""What a renderer stumbles over in a file that only looks like one of ours."""


def run_report(
    paths: Sequence[Path], output: Path, kinds: Mapping[str, Kind] = KINDS
) -> Path:
    """Read results and write a page.

    Args:
        paths: Results, in the order in which they are shown.
        output: Page to write; replaced as a whole.
        kinds: Who renders what.

    Returns:
        Where it is.

    Raises:
        ConfigError: A file is no result, or one of a benchmark that ``kinds`` leave
            out, or the page cannot be written.
    """
    real_output = _checked(output, paths)
    page = render_page(make_sections(read_sources(paths), kinds))
    try:
        with replacing(real_output) as pending:
            # JSON may hold halves of characters, which no file can.
            pending.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"output: {output} cannot be written: {error.strerror or error}; must be "
            "a file in a folder that is writable"
        ) from None
    return output


def _checked(output: Path, paths: Sequence[Path]) -> Path:
    """The file itself where a link is named: the link stays one."""
    real = Path(os.path.realpath(output))
    if not real.parent.is_dir():
        refuse("output", str(output), "a file in a folder that exists")
    if real.exists() and not real.is_file():
        refuse("output", str(output), "a file, not a folder or a device")
    if real in (Path(os.path.realpath(path)) for path in paths):
        refuse("output", str(output), "another file than the results")
    return real


def make_sections(
    sources: Sequence[Source], kinds: Mapping[str, Kind] = KINDS
) -> list[Section]:
    """A section for each result; evaluations of one model share theirs.

    Raises:
        DamagedError: A file has the keys of a result, but not what belongs there.
    """
    for source in sources:
        if source.kind not in kinds:
            raise ConfigError(
                f"result: {source.path} is of a benchmark; in a clone of the "
                "repository, `python -m benchmarks report` makes its page"
            )
    groups: dict[tuple[str, str], list[Source]] = {}
    for source in sources:
        is_eval = source.kind == EVAL
        own = str(source.content["model"]) if is_eval else source.name
        groups.setdefault((source.kind, own), []).append(source)
    titles = [_title(group, kinds) for group in groups.values()]
    return [
        _section(
            group,
            kinds[group[0].kind],
            f"result-{number}",
            # Two of a kind are told apart by their files.
            title if titles.count(title) == 1 else f"{title}: {group[0].name}",
        )
        for number, (title, group) in enumerate(
            zip(titles, groups.values(), strict=True), 1
        )
    ]


def _title(sources: Sequence[Source], kinds: Mapping[str, Kind]) -> str:
    first = sources[0]
    title = kinds[first.kind].title
    return f"{title} of {first.content['model']}" if first.kind == EVAL else title


def _section(sources: Sequence[Source], kind: Kind, anchor: str, title: str) -> Section:
    try:
        body = kind.render(sources)
        origins = [origin_of(each.name, each.content) for each in sources]
        drawn = draw_all(body.pictures, anchor)
    except DamagedError:
        raise
    except GARBLED as error:
        raise damaged(sources, error) from error
    return Section(anchor, title, kind.command, kind.meaning, body, origins, drawn)
