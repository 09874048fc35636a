"""Two independent references for DPE, slow and plain: the released loop, and the paper's equations.

Neither uses anything of the package. Queues are lists in a dictionary, gradients come from autograd, the
optimiser is PyTorch's own, and classes are visited one at a time. Matrices are (classes, features).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter


class Outcome(NamedTuple):
    logits: Tensor  # (N, C)
    text: Tensor  # (C, D) evolved
    updates: int
    queues: dict[int, list[tuple[Tensor, float]]]  # class -> (feature, entropy), lowest entropy first


def released(
    text: Tensor,
    stream: Tensor,
    *,
    scale: float = 100.0,
    alpha: float = 6.0,
    beta: float = 5.0,
    queue: int = 3,
    align_weight: float = 0.5,
    align_temperature: float = 0.01,
    lr_text: float = 6e-4,
    lr_image: float = 6e-4,
    steps: int = 1,
    entropy_threshold: float = 0.1,
    selection: float = 0.1,
    multi_view_prediction: bool = False,
    adamw_eps: float = 1e-3,
    adamw_betas: tuple[float, float] = (0.9, 0.999),
    adamw_weight_decay: float = 0.1,
    prompt_count: int = 1,
) -> Outcome:
    """The released loop; with several steps one optimiser goes on, and logits are computed anew at each."""
    evolved, updates, queues, answers = text.clone(), 0, {}, []
    bits = math.log2(len(text))
    for views in stream:
        # which queue, and how confidently, by the evolved text
        view_logits = scale * views @ _unit(evolved).T
        if len(views) > 1:
            chosen = _lowest(view_logits, selection)
            feature = sum(views[i] for i in chosen) / len(chosen)
            mean_logits = sum(view_logits[i] for i in chosen) / len(chosen)
            cost = _entropy(sum(view_logits[i].softmax(0) for i in chosen) / len(chosen))
        else:
            feature, mean_logits = views[0], view_logits[0]
            cost = _entropy(view_logits[0].softmax(0))
        _push(queues, int(mean_logits.argmax()), feature, float(cost) / bits, queue)

        # residuals on the text of all classes and the visual prototypes of the seen
        seen = sorted(queues)
        means = {k: sum(f for f, _ in queues[k]) / len(queues[k]) for k in seen}
        d_text = Parameter(torch.zeros_like(evolved))
        d_visual = {k: Parameter(torch.zeros_like(feature)) for k in seen}
        optimiser = torch.optim.AdamW(
            [
                {"params": [d_text], "lr": lr_text},
                {"params": list(d_visual.values()) or [_spare()], "lr": lr_image},
            ],
            betas=adamw_betas,
            eps=adamw_eps,
            weight_decay=adamw_weight_decay,
        )

        def score(
            f: Tensor, t: Tensor, evolved: Tensor = evolved, means: dict = means, d_visual: dict = d_visual
        ) -> Tensor:
            logits = []
            for c in range(len(t)):
                logit = scale * f @ t[c]
                if c in means:
                    logit = logit + alpha * torch.exp(-beta * (1 - f @ _unit(means[c] + d_visual[c])))
                logits.append(logit)
            return torch.stack(logits)

        for _ in range(steps):
            t = _unit(evolved + d_text)
            loss = _entropy(score(feature, t).softmax(0))
            if align_weight and seen:
                rows = []
                for k in seen:
                    v = _unit(means[k] + d_visual[k])
                    similarity = torch.stack([v @ t[j] for j in seen]) / align_temperature
                    rows.append(-similarity.log_softmax(0)[seen.index(k)])
                loss = loss + align_weight * sum(rows) / len(rows)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

        with torch.no_grad():
            t = _unit(evolved + d_text)
            shown = views[0]
            if multi_view_prediction:
                chosen = _lowest(scale * views @ t.T, selection)
                shown = sum(views[i] for i in chosen) / len(chosen)
            final = score(shown, t)
            if float(_entropy(final.softmax(0))) / bits < entropy_threshold:
                n = updates + prompt_count
                evolved = evolved * n / (n + 1) + t / (n + 1)
                updates += 1
        answers.append(final)
    return Outcome(torch.stack(answers), evolved, updates, queues)


def printed(
    text: Tensor,
    stream: Tensor,
    *,
    scale: float = 100.0,
    alpha: float = 6.0,
    beta: float = 5.0,
    queue: int = 3,
    align_weight: float = 0.5,
    lr_text: float = 5e-4,
    lr_image: float = 5e-4,
    steps: int = 1,
    entropy_threshold: float = 0.1,
    selection: float = 0.1,
    adamw_eps: float = 1e-3,
    adamw_betas: tuple[float, float] = (0.9, 0.999),
    adamw_weight_decay: float = 0.1,
) -> Outcome:
    """The paper's equations; the text prototype stands in for the visual one of a class with no image yet."""
    initial, t, k, queues, answers = text.clone(), text.clone(), 1, {}, []
    nats = math.log(len(text))
    for views in stream:
        v = torch.stack(
            [sum(f for f, _ in queues[c]) / len(queues[c]) if c in queues else _unit(t[c]) for c in range(len(text))]
        )
        t_hat, v_hat = Parameter(torch.zeros_like(t)), Parameter(torch.zeros_like(v))
        optimiser = torch.optim.AdamW(
            [{"params": [t_hat], "lr": lr_text}, {"params": [v_hat], "lr": lr_image}],
            betas=adamw_betas,
            eps=adamw_eps,
            weight_decay=adamw_weight_decay,
        )

        def proto(f: Tensor, text: Tensor, visual: Tensor) -> Tensor:
            """Logits of P_Proto: everything is divided by the temperature, the affinity too."""
            similarity = torch.stack([f @ row for row in visual])
            return (torch.stack([f @ row for row in text]) + alpha * torch.exp(-beta * (1 - similarity))) * scale

        # L_aug: entropy of the averaged P_Proto over the views that P_Proto is surest of
        confident = _lowest(torch.stack([proto(f, _unit(t), _unit(v)) for f in views]), selection)
        for _ in range(steps):
            moved_t, moved_v = _unit(t + t_hat), _unit(v + v_hat)
            average = sum(proto(views[i], moved_t, moved_v).softmax(0) for i in confident) / len(confident)
            align = 0.0
            for c in range(len(t)):
                by_text = torch.stack([moved_t[c] @ other for other in moved_v])
                by_image = torch.stack([other @ moved_v[c] for other in moved_t])
                align = align - by_text.log_softmax(0)[c] - by_image.log_softmax(0)[c]
            loss = _entropy(average) + align_weight * align / len(t)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

        with torch.no_grad():
            best_t, best_v = _unit(t + t_hat), _unit(v + v_hat)
            answers.append(proto(views[0], best_t, best_v))
            # P_CLIP of the image itself decides the queue, its entropy, and whether the text evolves
            clip = (scale * views[0] @ initial.T).softmax(0)
            h = float(_entropy(clip)) / nats
            if h < entropy_threshold:
                t, k = _unit((k - 1) * t + best_t), k + 1
            _push(queues, int(clip.argmax()), views[0], h, queue)
    return Outcome(torch.stack(answers), t, k - 1, queues)


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def _entropy(p: Tensor) -> Tensor:
    return -torch.where(p > 0, p * p.clamp_min(1e-300).log(), torch.zeros_like(p)).sum()


def _lowest(logits: Tensor, fraction: float) -> list[int]:
    """Rows of lowest entropy: the first of equals, and at least one."""
    costs = [float(_entropy(row.softmax(0))) for row in logits]
    order = sorted(range(len(costs)), key=lambda i: costs[i])
    return order[: max(1, int(len(costs) * fraction))]


def _push(queues: dict, label: int, feature: Tensor, cost: float, size: int) -> None:
    if size == 0:
        return
    row = queues.setdefault(label, [])
    if len(row) < size:
        row.append((feature, cost))
    elif cost < row[-1][1]:
        row[-1] = (feature, cost)
    row.sort(key=lambda item: item[1])


def _spare() -> Parameter:
    """A parameter that no loss reaches: an optimiser's group may not be empty."""
    return Parameter(torch.zeros(()))
