"""Encoders on Ray: replicas that encode images for every stream, and what a stream's process sees of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from torch import Tensor

from testtime.encoding.encoders import Deferred, load_encoder
from testtime.encoding.live import LiveEncoder
from testtime.encoding.stream import Encoded, Source
from testtime.images.gpu_views import as_pixels
from testtime.machine.devices import step_device
from testtime.serve.types import ServiceError
from testtime.types import InputError, Preprocess, ViewPlan

PATIENCE = 60.0  # seconds for a replica that died to be replaced
AGAIN = 0.2  # seconds before an image is sent to another replica

log = logging.getLogger("testtime.serve")


@dataclass(frozen=True)
class About:
    """What is known of an encoder without loading it."""

    name: str
    device: str
    dim: int
    scale: float
    preprocess: Preprocess


class EncoderReplica:
    """One encoder, which keeps nothing of the images that it sees: Ray Serve runs as many as there is work for."""

    def __init__(self, name: str, device: str, max_batch: int, deadline: float) -> None:
        self._encoder = load_encoder(name, device)
        self._live = LiveEncoder(self._encoder, max_batch=max_batch, deadline=deadline)

    async def about(self) -> About:
        """What streams need to know of it."""
        encoder = self._encoder
        return About(encoder.name, str(encoder.device), encoder.dim, encoder.scale, encoder.preprocess)

    def _check(self, name: str) -> None:
        """Refuse a stream of another encoder: its features would be taken for those of that one."""
        if name != self._encoder.name:
            raise RuntimeError(f"Encoder '{name}' is asked for, and this is '{self._encoder.name}'.")

    async def encode_texts(self, name: str, texts: Sequence[str]) -> np.ndarray:
        """Unit features of sentences, (n, D), of the encoder of that name."""
        self._check(name)
        found = await asyncio.to_thread(self._encoder.encode_texts, texts)
        return found.cpu().numpy()

    async def encode(
        self, name: str, pixels: np.ndarray, plan: ViewPlan, index: int, dtype: str
    ) -> np.ndarray | InputError:
        """Unit features (V, D) of an image of that index, or what is wrong with it."""
        self._check(name)
        encoder = self._encoder
        like = torch.empty(0, encoder.dim, dtype=getattr(torch, dtype), device=step_device(encoder.device))
        encoded = await asyncio.wrap_future(self._live.submit(pixels, plan, index, like))
        return encoded.error or encoded.usable().cpu().numpy()


class Encoders:
    """The replicas, as the encoder of a `Service` and as its `Live`; for one event loop, called from any thread.

    A replica that dies costs time alone: features depend on the image, the seed and the index, so another one gives the
    same. Features arrive on the CPU. What only a text tower with gradients can do is done here, by an encoder that is
    loaded when it is first asked for.
    """

    def __init__(self, about: About, replicas: Any) -> None:
        self.name, self.dim, self.scale, self.preprocess = about.name, about.dim, about.scale, about.preprocess
        self.device = torch.device("cpu")
        self._replicas, self._loop = replicas, asyncio.get_running_loop()
        self._here, self._waiting = Deferred(about.name), set[Future[Encoded]]()

    def __getattr__(self, name: str) -> Any:
        if name != "soft_prompts":
            raise AttributeError(f"'Encoders' has no attribute '{name}'")
        return getattr(self._here, name)

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Unit features of sentences, (n, D); not for the thread of the event loop."""
        work = self._patiently(lambda: self._replicas.encode_texts.remote(self.name, list(texts)))
        return torch.from_numpy(np.array(asyncio.run_coroutine_threadsafe(work, self._loop).result()))

    def submit(self, source: Source, plan: ViewPlan, index: int, like: Tensor | None = None) -> Future[Encoded]:
        """The features of an image of that index, from one of the replicas."""
        dtype = torch.float32 if like is None else like.dtype
        future = asyncio.run_coroutine_threadsafe(self._encoded(source, plan, index, dtype), self._loop)
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    async def _encoded(self, source: Any, plan: ViewPlan, index: int, dtype: torch.dtype) -> Encoded:
        pixels, kind = as_pixels(source).numpy(), str(dtype).removeprefix("torch.")
        found = await self._patiently(lambda: self._replicas.encode.remote(self.name, pixels, plan, index, kind))
        if isinstance(found, InputError):
            return Encoded(index, source, None, found)
        return Encoded(index, source, torch.from_numpy(np.array(found)))

    async def _patiently(self, call: Callable[[], Any]) -> Any:
        """What a call of a replica returns; while replicas die, the next one is called."""
        end = self._loop.time() + PATIENCE
        while True:
            try:
                return await call()
            except RayTaskError:  # an error of ours, which another replica would make too
                raise
            except (RayError, RayServeException) as problem:
                if self._loop.time() > end:
                    raise ServiceError(503, "No encoder answers; try again later.", 1.0) from None
                log.warning("an encoder is gone, asking another one: %s", type(problem).__name__)
                await asyncio.sleep(AGAIN)

    def warm_up(self, plan: ViewPlan) -> None:
        """Encode a black image, so that a replica is ready for this number of views."""
        self.submit(torch.zeros(64, 64, 3, dtype=torch.uint8), plan, 0).result()

    def close(self) -> None:
        """Wait for the images that were submitted."""
        wait(list(self._waiting))
