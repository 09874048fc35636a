"""`testtime serve`: the HTTP service; `testtime token`: who may use it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from testtime.cli import config, options
from testtime.cli.terminal import note, out, waiting
from testtime.errors import InputError, MissingPart

if TYPE_CHECKING:
    from collections.abc import Callable

    from testtime.serve.auth import Gate
    from testtime.serve.front_process import Address
    from testtime.serve.types import Settings

app = typer.Typer()
tokens = typer.Typer(no_args_is_help=True, help="Make, list and revoke the tokens of a service.")

FOLDER = Path("testtime-serve")
MEGABYTE = 2**20
FRONTS, DECODERS = 4, 8  # processes beside a GPU
NEEDED = ("fastapi", "httpx", "prometheus_client", "python_multipart", "uvicorn", "websockets")

Folder = Annotated[
    Path, typer.Option("--folder", "-f", metavar="FOLDER", help="Folder of the service: streams, states, tokens.")
]


@app.command(epilog="Example:  testtime serve --encoder offline --port 8000 --folder testtime-serve")
def serve(
    context: typer.Context,
    encoder: options.EncoderName = "offline",
    device: options.Device = "auto",
    folder: Folder = FOLDER,
    host: Annotated[
        str,
        typer.Option("--host", metavar="ADDRESS", help="Address to listen on; beyond this machine, a token is needed."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", help="Port to listen on.")] = 8000,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="TLS certificate (PEM), with --key.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="Private key (PEM) of the certificate.")] = None,
    log_format: Annotated[
        str, typer.Option("--log-format", metavar="NAME", help="Form of log lines: text or json.")
    ] = "text",
    max_batch: Annotated[int, typer.Option("--max-batch", help="Most images that are encoded together.")] = 32,
    deadline: Annotated[
        int, typer.Option("--deadline", help="Milliseconds an image waits at most for others, on a GPU.")
    ] = 14,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", help="Processes that speak HTTP; 0: the encoder's own. By default 4 beside a GPU, else 0."
        ),
    ] = None,
    decoders: Annotated[
        int | None, typer.Option("--decoders", help="Processes that decode images. By default 8 beside a GPU, else 2.")
    ] = None,
    waiting_images: Annotated[
        int, typer.Option("--waiting", help="Most images accepted and not answered yet; others get 429.")
    ] = 256,
    image_size: Annotated[int, typer.Option("--image-size", help="Largest image file, in MB.")] = 20,
    streams: Annotated[int, typer.Option("--streams", help="Most streams.")] = 100,
    snapshot_every: Annotated[
        int, typer.Option("--snapshot-every", help="Images between two snapshots: the most that a restart replays.")
    ] = 1000,
    keep_images: Annotated[
        int, typer.Option("--keep-images", help="Latest images of a stream that can be unlearned.")
    ] = 10_000,
    on: options.On = None,
    encoders: Annotated[
        int | None, typer.Option("--encoders", help="With --on: encoders that always run. By default 1.")
    ] = None,
    max_encoders: Annotated[
        int | None,
        typer.Option("--max-encoders", help="With --on: most encoders, started when there is work. By default 4."),
    ] = None,
    config_file: config.Config = None,
    save_config: config.SaveConfig = None,
) -> None:
    """Serve classifiers that learn while they are in use, over HTTP, with a page to watch them.

    Everything is kept in --folder, and a service that is stopped or killed goes on where it was. Without tokens it
    listens on this machine alone; 'testtime token add' makes one.

    With --on, it runs on Ray Serve: each stream in a process of its own, which is started again, on another machine if
    need be, when it dies. All machines must see --folder.
    """
    check_installed()
    from testtime.cluster.directory import check_layout
    from testtime.files import check_folder, locked
    from testtime.serve import logs
    from testtime.serve.auth import Gate, check_bind
    from testtime.serve.front_process import Address

    if log_format not in logs.FORMATS:
        raise InputError(f"Unknown --log-format '{log_format}'. Available: {', '.join(logs.FORMATS)}.")
    if not 0 <= port <= 65535:
        raise InputError(f"--port {port}: must be from 0 (any free one) to 65535.")
    check_tls(certificate, key)
    settings = settings_of(
        max_batch=max_batch, deadline=deadline, processes=processes, decoders=decoders, waiting=waiting_images,
        image_size=image_size, streams=streams, snapshot_every=snapshot_every, keep_images=keep_images,
    )  # fmt: skip
    running = _encoders(on, encoders, max_encoders)
    check_folder(folder)
    check_layout(folder, on is not None)
    check_bind(host, folder)
    config.save(context, save_config)

    context.with_resource(locked(folder / "service"))
    gate, tls = Gate(folder, host), (None, None) if certificate is None else (str(certificate), str(key))

    def announce(port: int) -> None:
        address = f"{'https' if certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
        note(f"testtime serves {encoder} from {folder}; Ctrl-C stops it.\n  page  {address}/\n  API   {address}/docs")
        if gate.open:
            note("  No token is needed, from this machine alone; 'testtime token add NAME --scope admin' changes that.")

    place = Address(str(folder), host, log_format, *tls)
    if on is None:
        _serve_here(context, encoder, device, settings, processes, decoders, gate, place, port, announce)
    else:
        settings = replace(settings, decoders=decoders or settings.decoders)
        _serve_on_ray(context, on, encoder, device, settings, processes or 1, running, place, port, announce)


def _serve_here(
    context: typer.Context, encoder: str, device: str, settings: Settings, processes: int | None, decoders: int | None,
    gate: Gate, place: Address, port: int, announce: Callable[[int], None],
) -> None:  # fmt: skip
    """Serve from this process, and from those in front of it."""
    from testtime.encoding.encoders import load_encoder
    from testtime.serve import logs
    from testtime.serve.server import bind
    from testtime.serve.service import Service

    listener = context.with_resource(bind(place.host, port))
    logs.set_up(place.log_format)
    with waiting(f"loading the encoder {encoder}"):
        loaded = load_encoder(encoder, device)
    shared = loaded.device.type != "cpu"  # a GPU encodes more than one process can answer
    processes = (FRONTS if shared else 0) if processes is None else processes
    decoders = (DECODERS if shared else settings.decoders) if decoders is None else decoders
    announce(listener.getsockname()[1])
    if processes:
        from testtime.serve.fronts import Fronts, serve_through

        service = Service(loaded, Path(place.folder), replace(settings, decoders=0))
        serve_through(lambda: Fronts(service, listener, processes, decoders, place), service)
    else:
        from testtime.serve.app import make_app
        from testtime.serve.server import configuration, serve_on

        service = Service(loaded, Path(place.folder), replace(settings, decoders=decoders))
        made = make_app(service, gate, settings.limits, secure=place.certificate is not None)
        serve_on(listener, configuration(made, settings.limits, place.certificate, place.key))


def _serve_on_ray(
    context: typer.Context, on: str, encoder: str, device: str, settings: Settings, fronts: int,
    encoders: tuple[int, int], place: Address, port: int, announce: Callable[[int], None],
) -> None:  # fmt: skip
    """Serve from a Ray cluster, until a signal."""
    from testtime.cluster.connect import address_of, connected
    from testtime.serve.server import bind

    if address_of(on) == "local":
        with bind(place.host, port) as free:
            port = free.getsockname()[1]
    with waiting("connecting to Ray"):
        context.with_resource(connected(on))
    from testtime.cluster.serving import Plan, serving, wait_for_signal

    plan = Plan(
        Path(place.folder).resolve(), encoder, device, settings, place.host, port, certificate=place.certificate,
        key=place.key, log_format=place.log_format, fronts=fronts, min_encoders=encoders[0], max_encoders=encoders[1],
    )  # fmt: skip
    with waiting(f"starting the encoder {encoder} on Ray"):
        context.with_resource(serving(plan, stays=address_of(on) != "local"))
    announce(port)
    wait_for_signal()


def _encoders(on: str | None, least: int | None, most: int | None) -> tuple[int, int]:
    """How many encoders run on Ray, at least and at most."""
    if on is None and (least, most) != (None, None):
        raise InputError("--encoders and --max-encoders are for a service on Ray; add --on ray, or leave them out.")
    least = 1 if least is None else least
    most = max(4, least) if most is None else most
    if not 1 <= least <= most <= 1000:
        raise InputError(f"--encoders {least}, --max-encoders {most}: must be from 1 to 1,000, the second not smaller.")
    return least, most


def check_installed() -> None:
    """Refuse to start without the packages of the extra."""
    from importlib.util import find_spec

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise MissingPart(f"'testtime serve' needs {', '.join(missing)}: pip install 'testtime[serve]'.")


def check_tls(certificate: Path | None, key: Path | None) -> None:
    """Refuse a certificate that cannot be used, before the encoder is loaded."""
    import ssl

    if (certificate is None) != (key is None):
        raise InputError("--certificate and --key belong together; give both or neither.")
    if certificate is not None and key is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        except OSError as problem:  # ssl.SSLError is one
            raise InputError(f"--certificate {certificate}, --key {key}: {problem.strerror or problem}.") from None


def settings_of(
    *, max_batch: int, deadline: int, processes: int | None, decoders: int | None, waiting: int, image_size: int,
    streams: int, snapshot_every: int, keep_images: int,
) -> Settings:  # fmt: skip
    """The settings that the options ask for; each is checked under its own name."""
    from testtime.serve.types import Limits, Settings

    bounds = {
        "--max-batch": (max_batch, 1, 1024), "--deadline": (deadline, 0, 1000),
        "--processes": (processes or 0, 0, 64), "--decoders": (1 if decoders is None else decoders, 1, 64),
        "--waiting": (waiting, 1, 100_000), "--image-size": (image_size, 1, 1000), "--streams": (streams, 1, 10_000),
        "--snapshot-every": (snapshot_every, 1, 1_000_000), "--keep-images": (keep_images, 0, 10_000_000),
    }  # fmt: skip
    for name, (value, low, high) in bounds.items():
        if not low <= value <= high:
            raise InputError(f"{name} {value}: must be from {low:,} to {high:,}.")
    size = image_size * MEGABYTE
    usual = Limits()
    limits = Limits(
        image_bytes=size, waiting=waiting, streams=streams, request_bytes=max(usual.request_bytes, 2 * size),
        body_bytes=max(usual.body_bytes, 4 * size),
    )  # fmt: skip
    return Settings(
        limits=limits, max_batch=max_batch, deadline=deadline / 1000, snapshot_every=snapshot_every,
        keep_images=keep_images,
    )  # fmt: skip


@tokens.command(epilog="Example:  testtime token add camera --scope learn --rate 50")
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who or what will use it; it appears in the log.")],
    scope: Annotated[
        str,
        typer.Option(
            "--scope", metavar="NAME", help="predict (answers and views), learn (images and labels too) or admin (all)."
        ),
    ] = "predict",
    rate: Annotated[float, typer.Option("--rate", metavar="X", help="Most requests a second; 0 for any number.")] = 0.0,
    folder: Folder = FOLDER,
) -> None:
    """Make a token, and print it on standard output: it is kept as a hash, and cannot be shown again."""
    from testtime.serve.auth import add_token

    secret = add_token(folder, name, scope, rate)
    note(f"The token {name} may {scope}. Keep it: it is not shown again.")
    print(secret)


@tokens.command("list", epilog="Example:  testtime token list")
def list_(folder: Folder = FOLDER) -> None:
    """List the tokens of a service."""
    from testtime.serve.auth import read_tokens

    table = Table("name", "scope", "requests a second", "made", box=None, pad_edge=False, header_style="dim")
    for token in read_tokens(folder):
        table.add_row(escape(token.name), token.scope, f"{token.rate:g}" if token.rate else "any", token.created)
    out.print(table)


@tokens.command(epilog="Example:  testtime token revoke camera")
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The token's name; see 'testtime token list'.")],
    folder: Folder = FOLDER,
) -> None:
    """Revoke a token; a running service refuses it within a second."""
    from testtime.serve.auth import revoke_token

    revoke_token(folder, name)
    note(f"The token {name} is revoked.")
