"""The Grafana dashboard and the alerts ask for metrics and labels that exist.

What exists is what `SpeculationMetrics` registers, and of vLLM's metrics a list that is
compared with vLLM's source. PromQL is read by a small parser, which has tests of its
own: a check that finds nothing must be able to find something.
"""

import importlib.util
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from prometheus_client import REGISTRY

from vllm_mtp.metrics.prometheus import LABELS, SpeculationMetrics, metric_names
from vllm_mtp.metrics.stats import LEVELS, PARTS, REASONS, SpeculationStats

CONFIGS = Path(__file__).parents[2] / "configs" / "grafana"
DASHBOARD = json.loads((CONFIGS / "vllm-mtp.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((CONFIGS / "alerts.yml").read_text(encoding="utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

VLLM_METRICS = {
    "vllm:generation_tokens": "counter",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_drafts": "counter",
}
"""Those that the dashboard shows beside ours, as vLLM's source names them."""

SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
}
RAY = yaml.safe_load((CONFIGS / "ray.yml").read_text(encoding="utf-8"))
REPLICA = "replica"
"""Of series that Prometheus has got from Ray (``ray.yml``); others do without."""
SCRAPE_LABELS = {"instance", "job", REPLICA}
"""Prometheus itself gives them to every series."""

# -- PromQL ---------------------------------------------------------------------------

AGGREGATORS = {"sum", "max", "min", "avg", "count"}
FUNCTIONS = {"rate", "increase", "deriv", "resets", "histogram_quantile"}
LABEL_LISTS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
OPERATORS = {"and", "or", "unless", "bool", "offset"}

_TOKEN = re.compile(
    r"""\s* ( "(?:[^"\\]|\\.)*" | \$\w+ | \d[\d.a-z]* | [A-Za-z_:][\w:]*
    | =~ | !~ | != | == | <= | >= | [-+*/%^<>=(){}\[\],] ) \s*""",
    re.VERBOSE,
)
_NAME = re.compile(r"[A-Za-z_:][\w:]*")


class Selector(NamedTuple):
    """A metric in an expression."""

    at: int
    metric: str
    matchers: list[tuple[str, str, str]]
    """Label, operator, value."""


class LabelList(NamedTuple):
    """What follows ``by``, ``on`` and their like."""

    keyword: str
    labels: list[str]
    metrics: list[str]
    """For ``by`` and ``without`` those that are aggregated, else all."""


class Query(NamedTuple):
    """An expression taken apart."""

    tokens: list[str]
    selectors: list[Selector]
    lists: list[LabelList]

    @property
    def metrics(self) -> set[str]:
        return {selector.metric for selector in self.selectors}


def tokens_of(expression: str) -> list[str]:
    tokens, at = [], 0
    while at < len(expression):
        found = _TOKEN.match(expression, at)
        if found is None:
            raise ValueError(f"not understood: {expression[at:]!r}")
        tokens.append(found[1])
        at = found.end()
    return tokens


def closing(tokens: list[str], at: int) -> int:
    """Where the parenthesis that opens at ``at`` closes."""
    if tokens[at : at + 1] != ["("]:
        raise ValueError(f"no parenthesis: {tokens[at : at + 3]}")
    depth = 0
    for index in range(at, len(tokens)):
        depth += (tokens[index] == "(") - (tokens[index] == ")")
        if not depth:
            return index
    raise ValueError(f"a parenthesis is not closed: {tokens[at : at + 3]}")


def parse(expression: str) -> Query:
    """Take a PromQL expression apart; ValueError where that fails."""
    tokens = tokens_of(expression)
    selectors: list[Selector] = []
    found: list[tuple[str, list[str], int]] = []
    at = 0
    while at < len(tokens):
        token, at = tokens[at], at + 1
        if token in LABEL_LISTS:
            end = closing(tokens, at)
            names = [name for name in tokens[at + 1 : end] if name != ","]
            found.append((token, names, end + 1))
            at = end + 1
        elif not _NAME.fullmatch(token) or token in AGGREGATORS | OPERATORS:
            continue
        elif tokens[at : at + 1] == ["("]:
            if token not in FUNCTIONS:
                raise ValueError(f"no function: {token}")
        else:
            start = at
            if tokens[at : at + 1] == ["{"]:
                at = tokens.index("}", at) + 1
            inner = tokens[start + 1 : at - 1]
            matchers = [
                (inner[i], inner[i + 1], inner[i + 2].strip('"'))
                for i in range(0, len(inner), 4)
            ]
            selectors.append(Selector(start - 1, token, matchers))
    lists = []
    for keyword, names, start in found:
        body = range(len(tokens))
        if keyword in ("by", "without"):
            body = range(start, closing(tokens, start))
        inside = [selector.metric for selector in selectors if selector.at in body]
        lists.append(LabelList(keyword, names, inside))
    return Query(tokens, selectors, lists)


# -- what exists ----------------------------------------------------------------------

Known = Mapping[str, Mapping[str, set[str] | None]]
"""Metric: label: the values it has, or None where it may have any."""


def our_metrics() -> Known:
    """As a server exposes them."""
    metrics = SpeculationMetrics("a model", [0], max_draft_length=3)
    stats = SpeculationStats.empty(3)
    stats.levels = dict.fromkeys(LEVELS, 0.0)
    metrics.add(stats, 0)
    known: dict[str, dict[str, set[str] | None]] = {}
    for sample in itertools.chain(*(family.samples for family in REGISTRY.collect())):
        if sample.name in metric_names():
            labels = known.setdefault(sample.name, dict.fromkeys(LABELS))
            for label in set(sample.labels) - set(LABELS):
                values = labels.get(label) or set()
                labels[label] = values | {sample.labels[label]}
    return known


def vllm_metrics() -> Known:
    """Of the list above, as vLLM exposes them."""
    known: dict[str, dict[str, set[str] | None]] = {}
    for name, kind in VLLM_METRICS.items():
        for suffix in SUFFIXES[kind]:
            own = ("le",) if suffix == "_bucket" else ()
            known[name + suffix] = dict.fromkeys((*LABELS, *own))
    return known


@pytest.fixture(scope="module")
def known() -> Known:
    """Every metric that may be asked for."""
    metrics = {**our_metrics(), **vllm_metrics()}
    return {name: {**labels, REPLICA: None} for name, labels in metrics.items()}


def complaints(expression: str, known: Known) -> list[str]:
    """What an expression asks for and does not exist."""
    query = parse(expression)
    found = [f"no metric {name}" for name in sorted(query.metrics - set(known))]
    for selector in query.selectors:
        labels = known.get(selector.metric, {})
        for label, operator, value in selector.matchers:
            if label not in labels:
                found.append(f"no label {label} of {selector.metric}")
                continue
            values = labels[label]
            wanted = value.split("|") if "~" in operator else [value]
            if values is not None and not values >= set(wanted):
                found.append(f"no {label} {value} of {selector.metric}")
    for keyword, names, metrics in query.lists:
        every = keyword in ("by", "without")
        for name in names:
            has_it = [name in known.get(metric, {}) for metric in metrics]
            if not (all(has_it) if every else any(has_it)):
                found.append(f"no label {name} for {keyword}")
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """Where, and the expression."""
    for panel in PANELS:
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])
    for note in DASHBOARD["annotations"]["list"]:
        if "expr" in note:
            yield note["name"], note["expr"]
    for rule in RULES:
        yield rule["alert"], rule["expr"]


ALL = list(expressions())
OF_THE_DASHBOARD = ALL[: -len(RULES)]


def for_each(uses: list[tuple[str, str]]) -> pytest.MarkDecorator:
    """Run a test once for each expression, under the name of its panel."""
    ids = [where for where, _ in uses]
    return pytest.mark.parametrize(("where", "expression"), uses, ids=ids)


# -- the parser and the check can fail ------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "metrics"),
    [
        ("up", {"up"}),
        ('rate(a:b_total{x="1", y=~"$y"}[$__rate_interval])', {"a:b_total"}),
        ("sum by (x, le) (rate(a[5m])) / ignoring (x) group_left () b", {"a", "b"}),
        (
            "histogram_quantile(0.99, sum by (le) (rate(a_bucket[1h]))) >= 0",
            {"a_bucket"},
        ),
        ('a{x="and b{}"} and on (x) (b > 0) or c offset 5m', {"a", "b", "c"}),
        ("1 - -0.02 * max(a) != bool 1e3", {"a"}),
    ],
)
def test_the_parser_finds_the_metrics_of_an_expression(expression, metrics) -> None:
    assert parse(expression).metrics == metrics


@pytest.mark.parametrize(
    "expression", ["rat(a[5m])", "sum by (x (a)", "a & b", "sum by"]
)
def test_the_parser_refuses_what_is_no_promql(expression) -> None:
    with pytest.raises(ValueError, match=r"no |not "):
        parse(expression)


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        (
            "rate(vllm_mtp:draft_token_total[5m])",
            "no metric vllm_mtp:draft_token_total",
        ),
        ("vllm_mtp:draft_tokens", "no metric vllm_mtp:draft_tokens"),
        (
            "vllm:num_requests_running_total",
            "no metric vllm:num_requests_running_total",
        ),
        (
            'vllm_mtp:step_seconds_total{part=~"target|verfy"}',
            "no part target|verfy of vllm_mtp:step_seconds_total",
        ),
        (
            'vllm_mtp:saved_seconds{part="target"}',
            "no label part of vllm_mtp:saved_seconds",
        ),
        (
            "sum by (position) (vllm_mtp:rejected_slots_total)",
            "no label position for by",
        ),
        (
            "sum by (part) (vllm_mtp:step_seconds_total + vllm_mtp:saved_seconds)",
            "no label part for by",
        ),
        ("sum by (le) (vllm:inter_token_latency_seconds_sum)", "no label le for by"),
    ],
)
def test_a_wrong_name_is_found(expression, complaint, known) -> None:
    assert complaints(expression, known) == [complaint]


# -- the expressions ------------------------------------------------------------------


@for_each(ALL)
def test_metrics_labels_and_values_exist(where, expression, known) -> None:
    assert complaints(expression, known) == [], where


def test_each_of_our_metrics_is_shown_or_watched(known) -> None:
    used = set().union(*(parse(expression).metrics for _, expression in ALL))
    assert set(metric_names()) - used == set()
    assert set(metric_names()) <= set(known)


def test_each_metric_of_vllm_is_used() -> None:
    used = set().union(*(parse(expression).metrics for _, expression in ALL))
    for name, kind in VLLM_METRICS.items():
        assert used & {name + suffix for suffix in SUFFIXES[kind]}, name


def test_vllm_declares_its_metrics_so() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vllm is not installed: its metric names cannot be looked up")
    folder = Path(spec.origin).parent / "v1"
    loggers = (folder / "metrics" / "loggers.py").read_text(encoding="utf-8")
    drafts = (folder / "spec_decode" / "metrics.py").read_text(encoding="utf-8")
    pattern = r'_(counter|gauge|histogram)_cls\(\s*name="([^"]+)"'
    declared = {name: kind for kind, name in re.findall(pattern, loggers + drafts)}
    names = re.findall(r'"(vllm:spec_decode_\w+)"', drafts)
    declared |= {name: "counter" for name in names}
    assert VLLM_METRICS.items() <= declared.items()


@for_each(ALL)
def test_a_division_by_nothing_shows_nothing(where, expression) -> None:
    """An idle server has rates of 0; ``> 0`` leaves them out instead of NaN."""
    tokens = parse(expression).tokens
    for at in [i + 1 for i, token in enumerate(tokens) if token == "/"]:
        while tokens[at] in LABEL_LISTS:
            at = closing(tokens, at + 1) + 1
        end = closing(tokens, at)
        assert tokens[end - 2 : end] == [">", "0"], where


@for_each(OF_THE_DASHBOARD)
def test_windows_follow_the_zoom_and_the_filters_are_set(where, expression) -> None:
    assert set(re.findall(r"\[(.*?)\]", expression)) <= {"$__rate_interval"}, where
    filters = [
        ("model_name", "=", "$model_name"),
        ("engine", "=~", "$engine"),
        (REPLICA, "=~", "$replica"),
    ]
    for selector in parse(expression).selectors:
        assert selector.matchers[:3] == filters, where


# -- the panels -----------------------------------------------------------------------


def test_each_panel_says_what_it_shows_and_in_which_unit() -> None:
    for panel in PANELS:
        title = panel["title"]
        assert title
        assert len(panel["description"].split()) >= 8, title
        assert panel["description"].endswith("."), title
        assert panel["fieldConfig"]["defaults"]["unit"], title
        assert panel["targets"], title
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(set(titles)) == len(titles)


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24, panel["title"]
        columns = range(place["x"], place["x"] + place["w"])
        for cell in itertools.product(
            columns, range(place["y"], place["y"] + place["h"])
        ):
            assert taken.setdefault(cell, panel["title"]) == panel["title"]


def test_legends_name_labels_that_the_series_still_have(known) -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            query = parse(target["expr"])
            kept = {name for each in query.lists for name in each.labels}
            if not kept and not AGGREGATORS & set(query.tokens):
                kept = SCRAPE_LABELS.union(*(known[name] for name in query.metrics))
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert named <= kept, panel["title"]


def test_parts_and_reasons_are_explained_where_they_are_shown() -> None:
    for names, label in ((PARTS, "part"), (REASONS, "reason")):
        legend = f"{{{{{label}}}}}"
        shown = [p for p in PANELS if p["targets"][0]["legendFormat"] == legend]
        assert shown
        for panel, name in itertools.product(shown, names):
            excluded = f'{label}!="{name}"' in panel["targets"][0]["expr"]
            assert excluded or f"{name}: {names[name]}" in panel["description"], name


def test_variables_are_declared_and_find_their_values(known) -> None:
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used - set(variables) == {"__all", "__rate_interval"}
    names = (*LABELS, REPLICA)
    assert set(variables) == {"datasource", *names}
    for name in names:
        query = variables[name]["query"]["query"]
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert asked is not None
        assert complaints(asked[1], known) == []
        assert asked[2] == name
    for name in ("engine", REPLICA):
        assert variables[name]["multi"]
        assert variables[name]["includeAll"]
        # Series without the label match, too: servers without Ray have no replicas.
        assert variables[name]["allValue"] == ".*"


def test_the_data_source_is_the_one_that_is_chosen() -> None:
    for panel in PANELS:
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


# -- Ray ------------------------------------------------------------------------------


def relabelled(labels: Mapping[str, str]) -> dict[str, str]:
    """What Prometheus makes of a series of Ray's by ``ray.yml``."""
    found = dict(labels)
    (job,) = RAY["scrape_configs"]
    for rule in job["metric_relabel_configs"]:
        (source,) = rule["source_labels"]
        match = re.fullmatch(rule["regex"], found.get(source, ""))
        if match is not None:
            found[rule["target_label"]] = re.sub(
                r"\$(\d)", lambda n, m=match: m[int(n[1])], rule["replacement"]
            )
    return found


def test_series_that_come_by_ray_get_their_own_names_back(known) -> None:
    for name in known:
        # As vLLM's `ray_wrappers` and Ray write it.
        theirs = "ray_" + re.sub(r"\W", "_", name)
        series = relabelled({"__name__": theirs, "ReplicaId": "abc"})
        assert series["__name__"] == name
        assert series[REPLICA] == "abc"


def test_other_series_of_ray_stay_as_they_are() -> None:
    series = {"__name__": "ray_serve_num_http_requests_total", "ReplicaId": ""}
    assert relabelled(series) == series


# -- the alerts -----------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_waits_and_says_what_it_means(rule, known) -> None:
    assert re.fullmatch(r"\d+[mh]", rule["for"])
    assert rule["labels"]["severity"] in {"info", "warning", "critical"}
    assert set(rule["annotations"]) == {"summary", "description"}
    text = " ".join(rule["annotations"].values())
    named = set(re.findall(r"\$labels\.(\w+)", text))
    labels = set(LABELS).union(*(known[m] for m in parse(rule["expr"]).metrics))
    assert named <= labels | SCRAPE_LABELS
    assert {"model_name", "engine"} <= named


def test_alerts_have_names_of_their_own() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names)) >= 4
