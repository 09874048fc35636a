"""DPE with the approach of its released code, reimplemented, to be timed beside ours.

Queues are lists in a dictionary, prototypes are gathered class by class in Python, residuals are parameters with
a new optimiser for every image, gradients flow back through the whole image encoder although nothing uses them, and
the clean view is encoded a second time for the prediction.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy, normalize

SCALE, ALPHA, BETA, QUEUE, ALIGN, TEMPERATURE, LR, GATE, CHOSEN = 100.0, 6.0, 5.0, 3, 0.5, 0.01, 6e-4, 0.1, 0.1


class ReleasedLoop:
    """The loop's state; `step` takes the normalised views (V, 3, H, W) of one image and returns its logits (C,)."""

    def __init__(self, model: Any, text: Tensor, autocast: bool = True) -> None:
        self.model = model.requires_grad_(True)  # as released: it is not frozen
        self.text = text.T.clone()  # (D, C)
        self.updates = 0
        self.queues: dict[int, list[tuple[Tensor, float]]] = {}
        self.device = text.device
        self.autocast = autocast

    def fill(self, noise: float = 0.05, cost: float = 1e-3) -> None:
        """Fill every queue, as after many images."""
        for label in range(self.text.shape[1]):
            near = self.text[:, label] + noise * torch.randn(QUEUE, self.text.shape[0], device=self.device)
            self.queues[label] = [(row[None], cost * (1 + slot)) for slot, row in enumerate(normalize(near, dim=1))]

    def step(self, pixels: Tensor) -> Tensor:
        half = torch.float16 if self.device.type == "cuda" else torch.bfloat16
        with torch.autocast(self.device.type, half, enabled=self.autocast):
            feature, logits, entropy, label = self._confident(pixels, self.text)
            self._enqueue(label, feature.detach(), entropy / math.log2(self.text.shape[1]))
            means, labels = self._prototypes()
            d_text = Parameter(torch.zeros_like(self.text))
            d_visual = Parameter(torch.zeros_like(means))
            optimiser = torch.optim.AdamW(
                [{"params": [d_text], "lr": LR}, {"params": [d_visual], "lr": LR}], eps=1e-3, weight_decay=0.1
            )
            text, visual = normalize(self.text + d_text, dim=0), normalize(means + d_visual, dim=0)
            scores = logits + self._affinity(feature, visual, labels)
            loss = _entropy(scores)
            similarity = visual.T @ text[:, labels] / TEMPERATURE
            loss = loss + ALIGN * cross_entropy(similarity, torch.arange(len(labels), device=self.device))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            with torch.no_grad():
                text, visual = normalize(self.text + d_text, dim=0), normalize(means + d_visual, dim=0)
                clean = normalize(self.model.encode_image(pixels[:1]).float(), dim=1)
                final = SCALE * clean @ text + self._affinity(clean, visual, labels)
                if float(_entropy(final)) / math.log2(self.text.shape[1]) < GATE:
                    self.updates += 1
                    count = self.updates
                    self.text = self.text * (count / (count + 1)) + text / (count + 1)
        return final[0].float()

    def _confident(self, pixels: Tensor, text: Tensor) -> tuple[Tensor, Tensor, float, int]:
        """The mean feature (1, D) and logit (1, C) of the confident views, their entropy and their label."""
        features = normalize(self.model.encode_image(pixels).float(), dim=1)
        logits = SCALE * features @ normalize(text, dim=0)
        if len(pixels) > 1:
            log_p = logits.log_softmax(1)
            chosen = (-(log_p.exp() * log_p).sum(1)).argsort()[: max(1, int(len(pixels) * CHOSEN))]
            features, logits = features[chosen], logits[chosen]
        mean = logits.softmax(1).mean(0, keepdim=True)
        entropy = float(-(mean * mean.clamp_min(1e-12).log()).sum().detach())
        feature, logit = features.mean(0, keepdim=True), logits.mean(0, keepdim=True)
        return feature, logit, entropy, int(logit.argmax())

    def _enqueue(self, label: int, feature: Tensor, cost: float) -> None:
        row = self.queues.setdefault(label, [])
        if len(row) < QUEUE:
            row.append((feature, cost))
        elif cost < row[-1][1]:
            row[-1] = (feature, cost)
        row.sort(key=lambda item: item[1])

    def _prototypes(self) -> tuple[Tensor, Tensor]:
        """Means (D, N) of the non-empty queues, and their labels (N,)."""
        means, labels = [], []
        for label in sorted(self.queues):
            total = torch.zeros_like(self.text[:, :1].T)
            for feature, _ in self.queues[label]:
                total = total + feature / len(self.queues[label])
            means.append(total)
            labels.append(label)
        return torch.cat(means).T.contiguous(), torch.tensor(labels, device=self.device)

    def _affinity(self, feature: Tensor, visual: Tensor, labels: Tensor) -> Tensor:
        closeness = (ALPHA * torch.exp(-BETA * (1 - feature @ visual))).float()
        answer = closeness.new_zeros(1, self.text.shape[1])
        return answer.index_add(1, labels, closeness)


def _entropy(logits: Tensor) -> Tensor:
    """Entropy of the softmax of one row (1, C)."""
    log_p = logits.float().log_softmax(1)
    return -(log_p.exp() * log_p).sum()
