"""What the Python blocks of a page need: the names that its text calls yours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Names = dict[str, Any]


def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Four micro-batches of tokens (2, 8) and their next tokens, the same for a step whenever it is asked."""
    generator = torch.Generator().manual_seed(step)
    for _ in range(4):
        tokens = torch.randint(16, (2, 9), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def tokens_to_tokens() -> nn.Module:
    """Tokens (batch, length) to logits (batch, length, 16)."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 32), nn.Dropout(0.1), nn.Linear(32, 16))


def _own_loop() -> Names:
    return {"model": tokens_to_tokens(), "batches": batches}


def _hugging_face() -> Names:
    torch.manual_seed(0)
    rows = torch.randint(256, (16, 32))
    return {"dataset": [{"input_ids": row, "labels": row} for row in rows]}


def _lightning() -> Names:
    import lightning.pytorch

    class Module(lightning.pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 1)

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return self.net(batch).float().square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return {"module": Module(), "loader": torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=4)}


def _readme() -> Names:
    torch.manual_seed(0)
    data = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(3)]  # inputs (4, 8), targets (4, 1)
    return {"model": nn.Linear(8, 1), "batches": data, "loss_of": nn.functional.mse_loss}


def _manager() -> Names:
    model = tokens_to_tokens()
    return {"model": model, "batches": list(batches(0))}


def _recipes() -> Names:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"to": 0, "be": 1, "?": 2}, unk_token="?")).save("tokenizer.json")
    return {"texts": ["to be", "be to"]}


SETUPS: dict[str, Callable[[], Names]] = {
    "README.md": _readme,
    "docs/howto/own_loop.md": _own_loop,
    "docs/howto/hugging_face.md": _hugging_face,
    "docs/howto/lightning.md": _lightning,
    "docs/offload_manager.md": _manager,
    "docs/recipes.md": _recipes,
}
SHORTER = {"docs/howto/own_loop.md": (("1000", "4"), ("% 100 ==", "% 2 =="))}
"""Replacements that make a page's blocks short."""
