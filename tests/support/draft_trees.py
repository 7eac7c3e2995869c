"""All drafts over a small vocabulary, and what an acceptance test makes of them."""

from itertools import product

import torch

from vllm_mtp.verification.reference import AcceptanceTest

VOCAB_SIZE = 4
Prefix = tuple[int, ...]


class Tree:
    """Target and proposal after every prefix up to a length."""

    def __init__(self, seed: int, depth: int, kind: str) -> None:
        self.depth = depth
        generator = torch.Generator().manual_seed(seed)
        self.target: dict[Prefix, torch.Tensor] = {}
        self.proposal: dict[Prefix, torch.Tensor] = {}
        for length in range(depth + 1):
            for prefix in product(range(VOCAB_SIZE), repeat=length):
                logits = 2.0 * torch.randn(2, VOCAB_SIZE, generator=generator).double()
                target, proposal = logits.softmax(-1)
                if kind == "small vocabulary":
                    proposal[: VOCAB_SIZE // 2] = 0.0
                elif kind == "top-k":
                    target[target.argmin()] = 0.0
                elif kind == "one-hot":
                    proposal = torch.zeros_like(proposal)
                    proposal[logits[1].argmax()] = 1.0
                elif kind == "equal":
                    proposal = target.clone()
                self.target[prefix] = target / target.sum()
                self.proposal[prefix] = proposal / proposal.sum()

    def rows(self, draft: Prefix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        prefixes = [draft[:i] for i in range(len(draft) + 1)]
        return (
            torch.stack([self.target[p] for p in prefixes]),
            torch.stack([self.proposal[p] for p in prefixes[:-1]]),
            torch.tensor(draft),
        )

    def draft_probability(self, draft: Prefix) -> float:
        chances = [self.proposal[draft[:i]][token] for i, token in enumerate(draft)]
        return float(torch.stack(chances).prod())

    def wanted(self, length: int) -> dict[Prefix, float]:
        """Joint distribution of the first tokens, of the target alone."""
        return {
            tokens: float(
                torch.stack(
                    [self.target[tokens[:i]][t] for i, t in enumerate(tokens)]
                ).prod()
            )
            for tokens in product(range(VOCAB_SIZE), repeat=length)
        }

    def given(self, test: AcceptanceTest, length: int) -> dict[Prefix, float]:
        """The same of what the test lets out; later tokens come from the target."""
        result = dict.fromkeys(product(range(VOCAB_SIZE), repeat=length), 0.0)
        for draft in product(range(VOCAB_SIZE), repeat=self.depth):
            chance = self.draft_probability(draft)
            if not chance:
                continue
            verdict = test(*self.rows(draft))
            for kept, share in enumerate(verdict.num_accepted.tolist()):
                for token, likely in enumerate(verdict.next_token[kept].tolist()):
                    start = (*draft[:kept], token)
                    self._spread(result, start, chance * share * likely)
        return result

    def _spread(
        self, result: dict[Prefix, float], start: Prefix, chance: float
    ) -> None:
        """Add a chance to all outcomes that begin so."""
        (length,) = {len(tokens) for tokens in result}
        if not chance:
            return
        for rest in product(range(VOCAB_SIZE), repeat=max(0, length - len(start))):
            tokens, likely = start, 1.0
            for token in rest:
                likely *= float(self.target[tokens][token])
                tokens = (*tokens, token)
            result[tokens[:length]] += chance * likely


def distance(tree: Tree, test: AcceptanceTest, length: int) -> float:
    given, wanted = tree.given(test, length), tree.wanted(length)
    return max(abs(given[tokens] - wanted[tokens]) for tokens in wanted)
