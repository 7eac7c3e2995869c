"""Engines on Model Runner V2 that continue drafts from contexts, in a fork of V2's."""

import json
from pathlib import Path
from typing import Any

ENGINE = {"max_num_seqs": 3, "max_model_len": 64}
MAX_DRAFTS = 5
NUM_TOKENS = 52


class CopiesAll:
    """A draft token for everybody, and whatever the context offers after it."""

    def decide(self, requests: Any) -> Any:
        from vllm_mtp.records import DraftDecision

        ids = [request.request_id for request in requests]
        chains, copies = dict.fromkeys(ids, 1), dict.fromkeys(ids, MAX_DRAFTS)
        return DraftDecision(1, chains, "copy", None, copies)

    def may_draft(self) -> bool:
        return True

    def num_undecided_steps(self) -> int:
        return 0

    def observe(self, outcome: Any) -> None:
        """It is decided."""

    observe_undecided = observe


class DraftsNothing(CopiesAll):
    """No draft token for anybody."""

    def decide(self, requests: Any) -> Any:
        from vllm_mtp.records import DraftDecision

        return DraftDecision(0, dict.fromkeys([r.request_id for r in requests], 0))

    def may_draft(self) -> bool:
        return False


class Watch:
    """What was offered, and what the scheduler heard of it."""

    def __init__(self) -> None:
        self.num_offers = 0
        self.depths: list[int] = []
        self.wrong: list[str] = []
        """Drafts that go on otherwise than NumPy finds."""
        self.counts: list[tuple[int, ...]] = []
        self.reported: list[tuple[int, ...]] = []
        self.num_alone = 0
        """Offers where nothing was drafted."""
        self.num_copying = 0
        """Steps in which somebody copied."""
        self.num_verified = 0
        self.num_accepted = 0
        """Of the copied ones that were verified."""

    def follow(self, llm: Any) -> None:
        """From here on."""
        from tests.support.engines import model_runner
        from tests.support.watch import record_outcomes, scheduler_of

        speculator, scheduler = model_runner(llm).speculator, scheduler_of(llm)
        self.recorder = record_outcomes(llm)
        continue_drafts, take = (
            speculator.copies.continue_drafts,
            scheduler._copying.take,
        )

        def watched(texts: Any, drafts: Any, num_drafts: int, longest: int) -> Any:
            # What stood there must not matter, nor be left.
            drafts[:, num_drafts:] = -1
            counts = continue_drafts(texts, drafts, num_drafts, longest)
            self._compare(texts, drafts, num_drafts, counts)
            return counts

        def taken(reports: Any) -> Any:
            found = [*reports.behind_drafts.values(), *reports.alone.values()]
            self.reported += [r[:3] for r in found if any(r[:3])]
            self.num_verified += sum(r.num_verified for r in found)
            self.num_alone += len(reports.alone)
            outcomes = take(reports)
            self.num_copying += bool(scheduler._copying.request_ids)
            return outcomes

        speculator.copies.continue_drafts = watched
        scheduler._copying.take = taken

    def _compare(self, texts: Any, drafts: Any, num_drafts: int, counts: Any) -> None:
        from vllm_mtp.drafting.context_copies import continuation

        self.depths.append(num_drafts)
        self.counts += [tuple(c) for c in counts.T.tolist() if any(c)]
        for row, index, sampled, (offered, *_) in zip(
            drafts, texts.idx_mapping, texts.num_sampled, counts.T.tolist(), strict=True
        ):
            length = int(texts.total_len[index])
            tokens = (
                texts.token_ids[index, :length].tolist() + row[:num_drafts].tolist()
            )
            room = min(MAX_DRAFTS, ENGINE["max_model_len"] - length) - num_drafts
            found: list[int] = []
            if sampled and num_drafts < MAX_DRAFTS:
                import numpy as np

                whole = np.array(tokens, dtype=np.int32)
                found = continuation(whole, num_drafts, max(room, 0)).tolist()
            wanted = found + [0] * (MAX_DRAFTS - num_drafts - len(found))
            if row[num_drafts:].tolist() != wanted or offered != len(found):
                self.wrong.append(f"{row.tolist()} {wanted} {offered}")
            self.num_offers += bool(found)

    def result(self) -> dict[str, Any]:
        """For JSON."""
        outcomes = [r for step in self.recorder.outcomes for r in step.requests]
        found = {
            name: value for name, value in vars(self).items() if name != "recorder"
        }
        return found | {
            "num_copied": sum(r.num_copied for r in outcomes),
            "num_accepted": sum(
                max(0, r.num_accepted_tokens - (r.num_draft_tokens - r.num_copied))
                for r in outcomes
            ),
            "num_left_out": sum(r.num_left_out for r in outcomes),
        }


def play(order: dict[str, Any]) -> None:
    """Greedy texts without speculation and with copies, of several engines."""
    from tests.support import adaptive_verification
    from tests.support.engine_jobs import let_the_cpu_schedule_async
    from tests.support.engines import engine, greedy
    from tests.support.faults import break_call
    from tests.support.heldout import BUNDLED_CHECKPOINT
    from tests.support.watch import scheduler_of
    from vllm_mtp.integration.v2.speculator import _MTPPlusSpeculator

    spec = {
        "method": "mtp_plus",
        "num_speculative_tokens": MAX_DRAFTS,
        "controller": "random",
    }
    prompts, found = order["prompts"], {}

    def run(name: str, num_tokens: int = NUM_TOKENS, controller: Any = None) -> None:
        options = {"speculative_config": spec} if name != "plain" else {}
        with engine(BUNDLED_CHECKPOINT, **ENGINE | options) as llm:
            watch = Watch()
            if options:
                watch.follow(llm)
            if controller is not None:
                scheduler_of(llm).controller = controller
            texts = greedy(llm, prompts, num_tokens)
            found[name] = {"texts": texts}
            if options:
                found[name] |= watch.result()

    run("plain")
    run("sync")
    run("off", controller=DraftsNothing())
    let_the_cpu_schedule_async()
    run("async")
    adaptive_verification.allow()
    run("adaptive")
    failures = break_call(_MTPPlusSpeculator, "_propose", 8, runs_first=True)
    run("failing", 20)
    found["num_failures"] = failures[0]
    Path(order["result"]).write_text(json.dumps(found))


def sample(order: dict[str, Any]) -> None:
    """Samples of an engine that copies all it can, by drawn drafts.

    Args:
        order: ``prompt``, ``settings``, ``num_samples``, ``num_tokens``, the method of
            ``rejection`` and where the ``result`` goes.
    """
    from tests.support.engines import engine, sampled
    from tests.support.heldout import BUNDLED_CHECKPOINT
    from tests.support.watch import scheduler_of

    spec = {
        "method": "mtp_plus",
        "num_speculative_tokens": MAX_DRAFTS,
        "rejection_sample_method": order["rejection"],
        "draft_sample_method": "probabilistic",
    }
    seats = {"max_num_seqs": 24, "max_model_len": 96, "max_num_batched_tokens": 2048}
    with engine(BUNDLED_CHECKPOINT, speculative_config=spec, **seats) as llm:
        scheduler_of(llm).controller = CopiesAll()
        samples = sampled(
            llm,
            order["prompt"],
            order["settings"],
            order["num_samples"],
            order["num_tokens"],
        )
        num_copied = scheduler_of(llm)._copying.num_verified
    found = {"samples": samples, "num_copied": num_copied}
    Path(order["result"]).write_text(json.dumps(found))
