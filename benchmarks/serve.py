"""Throughput and latency of `testtime serve`, beside an endpoint as people write it today.

    python benchmarks/serve.py --model ViT-B-16 --clients 1,8,32 --seconds 15 --out serve.json
    python benchmarks/serve.py --device cuda --classes 1000 --only testtime --processes 4 --decoders 8

Servers, one after another, each in its own process, with the same encoder (random weights) and the same JPEG files:
the service with DPE (and the guard, unless --no-guard), with the encoder in bfloat16 too, and two FastAPI endpoints
that read an image with Pillow, preprocess it, encode it alone and take the softmax: one with `def` (FastAPI's thread
pool), one with `async def` (one at a time).
Clients are processes with one keep-alive connection each, on the loopback address; each sends its next image when the
last is answered. Requests of the first seconds (--warm) are not counted. Look at `cores_used` before you compare: where
it differs between servers, their images a second do not compare, and `cpu_ms_per_image` does.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

STREAM = "/v1/streams/bench/images?top=1"
FILES = 64  # photographs that the clients share
SERVERS = ("testtime", "testtime@bfloat16", "def", "async def")
ENVIRONMENT = dict(os.environ)  # before testtime is imported, which sets how threads wait


# A client, in its own process: nothing heavy is imported


def client(port: int, path: str, folder: Path, number: int, each: int, start: float, warm: float, end: float) -> None:
    """Send requests of `each` images until a time, and print the seconds of each, and what the service says of them."""
    files = sorted(folder.glob("*.jpg"))
    images = [file.read_bytes() for file in files[number % len(files) :] + files[: number % len(files)]]
    kind = "image/jpeg"
    if each > 1:
        kind, part = (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n%s\r\n',
        )
        groups = [images[first : first + each] for first in range(0, len(images) - each + 1, each)]
        images = [b"".join(part % image for image in group) + b"--x--\r\n" for group in groups]
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds: list[float] = []
    stages: list[dict[str, float]] = []
    failed, count = 0, 0
    while time.time() < start:
        time.sleep(0.001)
    while (sent := time.time()) < end:
        began = time.perf_counter()
        connection.request("POST", path, images[count % len(images)], {"Content-Type": kind})
        response = connection.getresponse()
        body = response.read()
        took = time.perf_counter() - began
        count += 1
        if sent < warm:
            continue
        if response.status != 200:
            failed += 1
            continue
        seconds.append(took)
        if b'"milliseconds"' in body and count % 4 == 0:
            stages.append(json.loads(body)["answers"][0]["milliseconds"])
    print(json.dumps({"seconds": seconds, "failed": failed, "stages": stages}))


# The endpoints as people write them


def bare(form: str, encoder_name: str, device: str, classes: int, port: int) -> None:
    """Serve a zero-shot classifier with FastAPI, one image at a time."""
    from io import BytesIO

    import torch
    import uvicorn
    from fastapi import Depends, FastAPI, Request
    from PIL import Image

    prompts = [f"a photo of a thing {number}." for number in range(classes)]
    if encoder_name == "tiny":
        from testtime import load_encoder
        from testtime.images.views import clean

        encoder = load_encoder(encoder_name, device)
        text = encoder.encode_texts(prompts)

        def encode(image: Image.Image) -> torch.Tensor:
            return encoder.encode_images(clean(image, encoder.preprocess)[None].to(device))
    else:  # open_clip as its own documentation uses it; nothing of testtime is imported
        import open_clip

        name, _, weights = encoder_name.removeprefix("open_clip:").partition("/")
        model, _, preprocess = open_clip.create_model_and_transforms(name, pretrained=weights, device=device)
        model.eval()
        with torch.inference_mode():
            text = model.encode_text(open_clip.get_tokenizer(name)(prompts).to(device), normalize=True)

        def encode(image: Image.Image) -> torch.Tensor:
            return model.encode_image(preprocess(image)[None].to(device), normalize=True)

    def answer(data: bytes) -> dict[str, Any]:
        image = Image.open(BytesIO(data)).convert("RGB")
        with torch.inference_mode():
            share = (100 * encode(image) @ text.T).softmax(1)[0]
        best = int(share.argmax())
        return {"label": best, "confidence": float(share[best])}

    app = FastAPI()

    @app.get("/readyz")
    async def ready() -> dict[str, bool]:
        return {"ready": True}

    async def body(request: Request) -> bytes:
        return await request.body()

    def plain(data: bytes = Depends(body)) -> dict[str, Any]:  # noqa: B008
        return answer(data)  # in a thread of FastAPI's pool; the body was read before

    async def coroutine(data: bytes = Depends(body)) -> dict[str, Any]:  # noqa: B008
        return answer(data)  # in the event loop

    app.post("/images")(plain if form == "def" else coroutine)
    uvicorn.run(app, port=port, log_level="warning", access_log=False)


# The benchmark


@contextmanager
def server(kind: str, encoder: str, options: argparse.Namespace, folder: Path) -> Iterator[tuple[int, int]]:
    """One of the servers, ready: its port and its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if kind.startswith("testtime"):
        encoder += kind.removeprefix("testtime")
        words = ["-m", "testtime", "serve", "--encoder", encoder, "--device", options.device, "--port", port,
                 "--folder", folder / f"folder of {kind}", "--decoders", options.decoders,
                 "--processes", options.processes, "--max-batch", options.max_batch,
                 "--deadline", options.deadline]  # fmt: skip
    else:
        words = [__file__, "--bare", kind, "--encoder", encoder, "--device", options.device, "--classes",
                 options.classes, "--port", port]  # fmt: skip
    log = open(folder / f"{kind}.log", "w+")
    process = subprocess.Popen([sys.executable, *map(str, words)], stdout=log, stderr=log, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                if call(port, "GET", "/readyz")[0] == 200:
                    break
            except OSError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                raise RuntimeError(f"The server '{kind}' did not start: {log.read()[-800:]}")
            time.sleep(0.2)
        yield port, process.pid
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        log.close()


def call(port: int, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=300)
    content = body if isinstance(body, bytes) or body is None else json.dumps(body)
    kind = "image/jpeg" if isinstance(body, bytes) else "application/json"
    connection.request(method, path, content, {"Content-Type": kind})
    response = connection.getresponse()
    return response.status, response.read()


def cpu_seconds(process: int) -> float:
    """CPU time that a process and its children have used."""
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if process in (int(folder.name), int(fields[1])):
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(
    port: int, process: int, path: str, clients: int, options: argparse.Namespace, images: Path
) -> dict[str, Any]:
    """What this many clients see."""
    start = time.time() + 1.0 + 0.15 * clients  # until all of them are up
    warm, end = start + options.warm, start + options.warm + options.seconds
    before = busy(port) if path == STREAM else None
    words = [__file__, "--client", str(port), path, str(images)]
    running = [
        subprocess.Popen(
            [sys.executable, *words, str(number), str(options.each), str(start), str(warm), str(end)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(clients)
    ]
    time.sleep(max(0.0, warm - time.time()))
    used = cpu_seconds(process)
    time.sleep(max(0.0, end - time.time()))
    used = cpu_seconds(process) - used
    found = [json.loads(each.communicate(timeout=300)[0]) for each in running]
    seconds = sorted(each for one in found for each in one["seconds"])
    if not seconds:
        raise RuntimeError(f"No request of {clients} clients was answered.")
    result: dict[str, Any] = {
        "clients": clients,
        "images": options.each * len(seconds),
        "failed": sum(one["failed"] for one in found),
        "images_per_second": round(options.each * len(seconds) / options.seconds, 2),
        "cpu_ms_per_image": round(1000 * used / (options.each * len(seconds)), 2),
        "cores_used": round(used / options.seconds, 2),  # fewer than there are: others had them, or it waited
        **{f"p{q}_ms": round(1000 * seconds[min(len(seconds) - 1, len(seconds) * q // 100)], 2) for q in (50, 90, 99)},
    }
    stages = [each for one in found for each in one["stages"]]
    if stages:
        result["stages_ms"] = {name: round(sum(each[name] for each in stages) / len(stages), 2) for name in stages[0]}
    if before is not None:
        after = busy(port)
        result["batch_images"] = round((after[0] - before[0]) / max(1, after[2] - before[2]), 2)
    return result


def learned(port: int) -> int:
    """Images that the stream has learned from."""
    return int(json.loads(call(port, "GET", "/v1/streams/bench")[1])["learned"])


def busy(port: int) -> tuple[float, float, float]:
    """Images encoded, seconds of their batches, and the number of batches, from the service's metrics."""
    found = {}
    for line in call(port, "GET", "/metrics")[1].decode().splitlines():
        name, _, value = line.partition(" ")
        if name.startswith("testtime_batch_"):
            found[name] = float(value)
    return found["testtime_batch_images_sum"], found["testtime_batch_seconds_sum"], found["testtime_batch_images_count"]


def encoder_alone(encoder_name: str, options: argparse.Namespace, images: Path) -> dict[str, float]:
    """Images a second of the encoder, and its CPU time, from pixels in memory, encoded as the service does it."""
    code = f"""
import time, numpy, torch
from pathlib import Path
from PIL import Image
from testtime import load_encoder
from testtime.encoding.live import LiveEncoder
from testtime.types import ViewPlan
encoder = LiveEncoder(load_encoder({encoder_name!r}, {options.device!r}), max_batch={options.max_batch})
files = sorted(Path({str(images)!r}).glob("*.jpg"))
pixels = [torch.from_numpy(numpy.array(Image.open(file).convert("RGB"))) for file in files]
plan = ViewPlan()
[future.result() for future in [encoder.submit(each, plan, 0) for each in pixels[:8]]]
began, used, count, waiting = time.perf_counter(), time.process_time(), 0, []
while time.perf_counter() - began < {options.seconds}:
    waiting.append(encoder.submit(pixels[count % len(pixels)], plan, count))
    count += 1
    if len(waiting) >= 2 * {options.max_batch}:
        waiting.pop(0).result()
[future.result() for future in waiting]
print(count / (time.perf_counter() - began), 1000 * (time.process_time() - used) / count)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    speed, cost = map(float, done.stdout.split())
    return {"images_per_second": round(speed, 2), "cpu_ms_per_image": round(cost, 2)}


def run(options: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parent))
    from commands import checkpoint, machine, photograph

    report: dict[str, Any] = {"machine": machine(options.device), "options": vars(options) | {"out": str(options.out)}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = folder / "images"
        images.mkdir()
        for number in range(FILES):
            photograph(number).save(images / f"{number:04d}.jpg", quality=90)
        encoder = checkpoint(options.model, folder)
        for kind in options.only.split(","):
            report[kind], ours = [], kind.startswith("testtime")
            if ours and not options.no_alone:
                alone = encoder_alone(encoder + kind.removeprefix("testtime"), options, images)
                report.setdefault("encoder alone", {})[kind] = alone
                print(f"encoder of {kind} alone: {alone['images_per_second']} images a second", flush=True)
            with server(kind, encoder, options, folder) as (port, process):
                path = STREAM if ours else "/images"
                if ours:
                    classes = [f"thing {number}" for number in range(options.classes)]
                    described = {"name": "bench", "classes": classes, "guard": not options.no_guard}
                    status, body = call(port, "POST", "/v1/streams", described)
                    if status != 201:
                        raise RuntimeError(body.decode())
                status, body = call(port, "POST", path, photograph_bytes(images))  # compiles
                if status != 200:
                    raise RuntimeError(body.decode())
                for clients in map(int, options.clients.split(",")):
                    before = learned(port) if ours else 0
                    found = measure(port, process, path, clients, options, images)
                    if ours:
                        found["learned"] = learned(port) - before  # images of the warm-up among them
                    report[kind].append(found)
                    print(kind, json.dumps(found), flush=True)
                    if options.out:
                        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def photograph_bytes(images: Path) -> bytes:
    return next(images.glob("*.jpg")).read_bytes()


def summary(report: dict[str, Any]) -> None:
    """Print how the servers compare, by the number of clients."""
    for kind, alone in report.get("encoder alone", {}).items():
        for ours in report[kind]:
            lost = 1 - ours["images_per_second"] / alone["images_per_second"]
            outside = 1 - alone["cpu_ms_per_image"] / ours["cpu_ms_per_image"]
            print(
                f"{kind}, {ours['clients']} clients: {lost:.1%} of the encoder's own throughput is lost around it, ",
                end="",
            )
            print(f"and {outside:.1%} of the CPU time is spent outside it", end="")
            for bare in ("def", "async def"):
                for theirs in report.get(bare, []):
                    if theirs["clients"] == ours["clients"]:
                        print(f"; {ours['images_per_second'] / theirs['images_per_second']:.2f}x '{bare}'", end="")
            print()


def main(arguments: list[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--client"]:
        port, path, folder, number, each, *times = words[1:]
        return client(int(port), path, Path(folder), int(number), int(each), *map(float, times))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file, rewritten after every measurement")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="ViT-B-16", help="or tiny")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--each", type=int, default=1, help="images in a request, of the service alone")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--warm", type=float, default=3)
    parser.add_argument("--decoders", type=int, default=2)
    parser.add_argument("--processes", type=int, default=0, help="that speak HTTP for the service")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--deadline", type=int, default=14, help="milliseconds, as of the service")
    parser.add_argument("--no-guard", action="store_true")
    parser.add_argument("--no-alone", action="store_true", help="do not measure the encoder by itself")
    parser.add_argument("--only", default=",".join(SERVERS))
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    parser.add_argument("--encoder", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.bare:
        return bare(options.bare, options.encoder, options.device, options.classes, options.port)
    summary(run(options))


if __name__ == "__main__":
    main()
