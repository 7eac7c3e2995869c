"""Lost and damaged MTP weights are named: by vLLM's model itself, at start, in doctor.

The matrix takes every weight of every family's MTP layers away, one at a time.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs

from tests.support import absent_torchvision
from tests.support.engines import assistant_option, engine
from tests.support.families import FAMILIES, NOT_RUN
from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.random_checkpoints import write_checkpoint
from tests.support.vllm_gaps import fill_gaps
from vllm_mtp.config import ConfigError
from vllm_mtp.integration.load import checkpoint, dry_build, engine_args
from vllm_mtp.integration.load.child import in_child
from vllm_mtp.integration.load.doctor import weight_facts
from vllm_mtp.integration.load.dry_build import draft_model_on_meta
from vllm_mtp.integration.load.dry_load import dry_load
from vllm_mtp.integration.load.headers import find_headers
from vllm_mtp.integration.load.layer_types import restore_layer_types
from vllm_mtp.integration.load.weight_health import Header
from vllm_mtp.integration.worker.loaded_weights import checked_loading
from vllm_mtp.tools.doctor import TRIED_FAMILIES

MTP = "model.mtp_layers.0."
O_PROJ = f"{MTP}self_attn.o_proj.weight"
Q_PROJ = f"{MTP}self_attn.q_proj.weight"
INPUT_PROJ = f"{MTP}input_proj.weight"
KNOWN = FAMILIES | NOT_RUN
Tensors = dict[str, torch.Tensor]
Headers = dict[str, Header]

INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


@pytest.fixture(scope="module", autouse=True)
def seam() -> None:
    engine_args.install()


def written(folder: Path, family: str, num_mtp_layers: int) -> list[str]:
    """Write a checkpoint of a family and return its MTP layers' names."""
    if family == "bundled":
        shutil.copytree(BUNDLED_CHECKPOINT, folder)
        return [name for name in find_headers(str(folder), None) if MTP in name]
    fill_gaps()
    write_checkpoint(folder, family, num_mtp_layers=num_mtp_layers)
    known = KNOWN[family]
    if known.assistant_config is not None:
        own = find_headers(str(drafting_checkpoint(folder)), None)
        # Of Gemma 4: buffers, which are 1 if nothing is loaded into them.
        return [name for name in own if not name.endswith("layer_scalar")]
    return [
        name
        for name in find_headers(str(folder), None)
        if known.is_mtp_weight(name)
        # Of DeepSeek and GLM; the target's are used.
        and not name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
    ]


def drafting_checkpoint(folder: Path) -> Path:
    """Where the MTP layers' weights are."""
    return Path(assistant_option(folder).get("model", folder))


def quantized(headers: Headers) -> Headers:
    """With all linear layers of a decoder layer in 8 bits, with scales."""
    result = {}
    for name, header in headers.items():
        result[name] = header
        if name.endswith("_proj.weight") and "input_proj" not in name:
            result[name] = Header("I8", header.shape, None)
            result[f"{name}_scale"] = Header("F32", (header.shape[0], 1), None)
    return result


def vllm_config(folder: Path, num_mtp_layers: int = 1) -> Any:
    """As vLLM makes it, for its own method."""
    speculative = {"method": "mtp", "num_speculative_tokens": num_mtp_layers}
    config = EngineArgs(
        model=str(folder),
        max_model_len=64,
        speculative_config=speculative | assistant_option(folder),
    ).create_engine_config()
    restore_layer_types(config)
    return config


def lose_each(config: Any, headers: Headers, own: list[str]) -> list[Any]:
    """The whole checkpoint, then without each weight: what was not said of one."""
    model = draft_model_on_meta(config)
    num_layers = config.model_config.get_total_num_hidden_layers()
    whole = dry_load(model, headers, num_layers)
    wrong: list[Any] = []
    if (sorted(whole.own), whole.missing, whole.nameless) != (sorted(own), [], []):
        wrong.append(whole)
    for name in own:
        rest = {each: header for each, header in headers.items() if each != name}
        lost = dry_load(model, rest, num_layers)
        if (lost.missing, lost.nameless, lost.wrong_shape) != ([name], [], {}):
            wrong.append((name, lost))
    return wrong


def bend_each(config: Any, headers: Headers, own: list[str]) -> list[Any]:
    """Each weight longer, and with a dimension more: what was not said of one."""
    model = draft_model_on_meta(config)
    num_layers = config.model_config.get_total_num_hidden_layers()
    wrong: list[Any] = []
    for name in own:
        header = headers[name]
        for shape in ((header.shape[0] + 3, *header.shape[1:]), (*header.shape, 7)):
            other = header._replace(shape=shape)
            bent = dry_load(model, headers | {name: other}, num_layers)
            if (list(bent.wrong_shape), bent.missing, bent.unknown) != ([name], [], {}):
                wrong.append((name, shape, bent))
    return wrong


@pytest.mark.parametrize(
    ("family", "num_mtp_layers"),
    [
        *((name, family.num_mtp_layers) for name, family in KNOWN.items()),
        *(("bundled", 1), ("mimo", 2)),
    ],
)
def test_every_weight_that_is_lost_or_has_another_shape_is_named(
    family: str, num_mtp_layers: int, tmp_path: Path
) -> None:
    own = written(tmp_path / family, family, num_mtp_layers)
    headers = find_headers(str(drafting_checkpoint(tmp_path / family)), None)
    with absent_torchvision.stand_in():
        config = vllm_config(tmp_path / family, num_mtp_layers)
        for ask in (lose_each, bend_each):
            assert in_child(partial(ask, config, headers, own)) == []


def test_the_doctor_knows_which_families_are_run(tmp_path: Path) -> None:
    architectures = set()
    for family in FAMILIES:
        written(tmp_path / family, family, FAMILIES[family].num_mtp_layers)
        config = vllm_config(tmp_path / family)
        (architecture,) = config.speculative_config.draft_model_config.architectures
        architectures.add(architecture)
    # Extra heads are no family of vLLM's.
    assert architectures | {"ExtraHeads"} == TRIED_FAMILIES


def test_weights_and_scales_of_a_quantized_layer_are_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mimo")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": INT8}
    path.write_text(json.dumps(config))
    headers = quantized(find_headers(str(tmp_path), None))
    own = [name for name in headers if MTP in name]
    assert f"{O_PROJ}_scale" in own
    assert in_child(partial(lose_each, vllm_config(tmp_path), headers, own)) == []


def drop(name: str, tensors: Tensors) -> None:
    del tensors[name]


def zero(name: str, tensors: Tensors) -> None:
    tensors[name].zero_()


def put_nan(name: str, tensors: Tensors) -> None:
    tensors[name][0] = torch.nan


def bend(name: str, tensors: Tensors) -> None:
    tensors[name] = torch.cat([tensors[name], tensors[name]])


def add(name: str, tensors: Tensors) -> None:
    tensors[f"{name}.more"] = tensors[name].clone()


def damaged(folder: Path, damage: Callable[[Tensors], None], layers: int = 1) -> Path:
    """A checkpoint of MiMo's family with a fault in its one file."""
    path = write_checkpoint(folder, "mimo", num_mtp_layers=layers) / "model.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def refusal(model: Path, **arguments: Any) -> str:
    """What a start says."""
    with pytest.raises(ConfigError) as caught:
        EngineArgs(
            model=str(model),
            max_model_len=64,
            speculative_config={"method": "mtp_plus"},
            **arguments,
        ).create_engine_config()
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def doctor(model: Path) -> list[str]:
    """What the doctor finds."""
    facts = weight_facts(str(model), 1)
    assert not isinstance(facts, str)
    return list(checkpoint.describe(facts.problems))


@pytest.mark.parametrize("name", [INPUT_PROJ, Q_PROJ, O_PROJ])
@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (drop, "missing: {}"),
        (bend, "wrong shape: {} (["),
        (put_nan, "not finite: {} ("),
        (add, "unknown: {}.more ("),
    ],
)
def test_start_and_doctor_name_what_vllm_cannot_use(
    damage: Callable[[str, Tensors], None], kind: str, name: str, tmp_path: Path
) -> None:
    model = damaged(tmp_path, partial(damage, name))
    assert kind.format(name) in refusal(model)
    (found,) = doctor(model)
    assert found.startswith(kind.format(name))


def test_zeros_are_a_warning_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        checkpoint.logger, "warning", lambda text, *values: said.append(text % values)
    )
    model = damaged(tmp_path, partial(zero, O_PROJ))
    EngineArgs(
        model=str(model),
        max_model_len=64,
        speculative_config={"method": "mtp_plus"},
    ).create_engine_config()
    (sentence,) = said
    assert f"zero: {O_PROJ} (" in sentence
    assert doctor(model)[0].startswith(f"zero: {O_PROJ} (")


def test_a_whole_layer_of_two_is_named(tmp_path: Path) -> None:
    def drop_second(tensors: Tensors) -> None:
        for name in [each for each in tensors if ".mtp_layers.1." in each]:
            del tensors[name]

    model = damaged(tmp_path, drop_second, layers=2)
    sentence = refusal(model)
    assert "promises 2 MTP layer(s)" in sentence
    assert "model.mtp_layers.1." in sentence
    assert "model.mtp_layers.0." not in sentence
    assert "and 8 more" in sentence


def write_index(folder: Path, files: dict[str, Tensors], listed: set[str]) -> Path:
    """A checkpoint of several files, of which the index lists some weights."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    places = {}
    for file, tensors in files.items():
        if tensors:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    index = {"weight_map": {n: f for n, f in places.items() if n in listed}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("where", ["index", "shard", "file", "both"])
def test_index_and_shards_that_disagree(where: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "mimo")
    tensors = load_file(model / "model.safetensors")
    extra = {O_PROJ: tensors.pop(O_PROJ)}
    names = {*tensors, O_PROJ}
    if where == "both":
        write_index(model, {"a.safetensors": tensors, "b.safetensors": extra}, names)
        assert doctor(model) == []
        return
    if where == "shard":  # the file is listed for its other weights: vLLM loads it
        write_index(model, {"a.safetensors": tensors | extra}, {*tensors})
        assert doctor(model) == []
        return
    if where == "index":
        write_index(model, {"a.safetensors": tensors}, {*tensors})
        path = model / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"][O_PROJ] = "a.safetensors"
        path.write_text(json.dumps(index))
        wanted = f"missing: {O_PROJ}"
    else:  # and another one is nowhere: otherwise the unlisted file would do
        del tensors[Q_PROJ]
        write_index(
            model, {"a.safetensors": tensors, "b.safetensors": extra}, {*tensors}
        )
        wanted = f"missing: {O_PROJ} (in b.safetensors, which model.safetensors.index"
    for said in (refusal(model), doctor(model)[0]):
        assert wanted in said
        assert "missing: " in said


def test_a_file_of_the_index_that_is_not_there(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "mimo")
    tensors = load_file(model / "model.safetensors")
    files = {"a.safetensors": tensors, "b.safetensors": {O_PROJ: tensors.pop(O_PROJ)}}
    write_index(model, files, {*tensors, O_PROJ})
    (model / "b.safetensors").unlink()
    assert "b.safetensors" in refusal(model)
    with pytest.raises(ConfigError, match=r"b\.safetensors"):
        doctor(model)


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "mimo") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors cannot be read" in refusal(tmp_path)


def test_where_vllm_cannot_be_asked_a_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: Any) -> Any:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(dry_build, "draft_model_on_meta", fail)
    model = damaged(tmp_path, partial(drop, O_PROJ))
    EngineArgs(
        model=str(model),
        max_model_len=64,
        speculative_config={"method": "mtp_plus"},
    ).create_engine_config()
    assert "no such kernel" in str(weight_facts(str(model), 1))


def test_what_other_formats_lost_is_named_once_it_is_loaded(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "mimo")
    tensors = load_file(model / "model.safetensors")
    del tensors[O_PROJ]
    torch.save(tensors, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    try:
        with (
            pytest.raises(ConfigError, match=r"self_attn\.o_proj\.weight\. Use a"),
            engine(model, speculative_config={"method": "mtp_plus"}),
        ):
            raise AssertionError("it has started")
    finally:
        cleanup_dist_env_and_memory()


class Draft(torch.nn.Module):
    """A draft model with one padded parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 3, bias=False)
        self.fc.weight.weight_loader_numel = 8

    def load_weights(self, weights: Any) -> set[str]:
        for name, tensor in weights:
            self.fc.weight.data[: len(tensor)] = tensor
            assert name == "fc.weight"
        return {"fc.weight"}


class DraftOfAnother(Draft):
    """Inherits how it is loaded."""


@pytest.mark.parametrize("model_class", [Draft, DraftOfAnother])
def test_padding_becomes_zero_and_the_loader_is_put_back(
    model_class: type[Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vllm_mtp.integration.worker.loaded_weights.get_model_cls",
        lambda config: model_class,
    )
    before = dict(vars(model_class))
    config: Any = type("Config", (), {"model": "some/model"})
    model = model_class()
    with checked_loading(config):
        model.load_weights([("fc.weight", torch.ones(2, 4))])
    assert model.fc.weight.tolist() == [[1.0] * 4, [1.0] * 4, [0.0] * 4]
    for tensors in ([], [torch.ones(1, 4)], [torch.full((2, 4), torch.inf)]):
        weights, model = [("fc.weight", each) for each in tensors], model_class()
        with (
            pytest.raises(ConfigError, match=r"'some/model'.*: fc\.weight\. Use"),
            checked_loading(config),
        ):
            model.load_weights(weights)
    assert dict(vars(model_class)) == before
