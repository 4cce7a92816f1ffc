"""Checkpoints with a head that predicts further tokens, and PyTorch's version of the head as it is published."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file

PREFIX = "mtp.layers.0."
FILE = "model.safetensors"


class TorchHead:
    """The published head on transformers' model: entry i joins token i + 1's embedding with the hidden state at i."""

    def __init__(self, model, tensors: dict[str, torch.Tensor]):
        self.model = model
        self.tensors = tensors
        self.layer = copy.deepcopy(_attends(model)).eval()
        self.layer.load_state_dict({n.removeprefix(PREFIX): t for n, t in tensors.items() if n.startswith(PREFIX)})

    @torch.no_grad()
    def states(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The head's states of the entries of `tokens`, each of which follows the one that `hidden` is of."""
        embedded = self.model.model.embed_tokens(tokens)
        joined = [self._norm("pre_fc_norm_embedding", embedded), self._norm("pre_fc_norm_hidden", hidden)]
        x = (torch.cat(joined, dim=-1) @ self.tensors["mtp.fc.weight"].T)[None]
        places = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        turned = self.model.model.rotary_emb(x, places)
        out = self.layer(x, position_embeddings=turned, attention_mask=mask, position_ids=places)
        return self._norm("norm", (out[0] if isinstance(out, tuple) else out)[0])

    @torch.no_grad()
    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """The model's hidden states of one sequence."""
        return self.model.model(tokens[None]).last_hidden_state[0]

    @torch.no_grad()
    def drafts(self, token_ids: list[int], number: int) -> list[int]:
        """The most likely tokens after a sequence, as the head sees it; later ones follow its own states."""
        tokens = torch.tensor(token_ids)
        hidden = self.hidden(tokens)[:-1]
        for _ in range(number):
            out = self.states(tokens[1:], hidden)
            hidden = torch.cat([hidden, out[-1:]])
            tokens = torch.cat([tokens, self.model.lm_head(out[-1:]).argmax(-1)])
        return tokens[len(token_ids) :].tolist()

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        eps = self.model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + self.tensors[f"mtp.{name}.weight"])


def make_checkpoint_with_head(family: str, folder: Path, **changes) -> TorchHead:
    """Save a tiny model with a random head."""
    model = make_checkpoint(family, folder, tie_word_embeddings=False, **changes)
    torch.manual_seed(5)
    shapes = {PREFIX + name: tensor.shape for name, tensor in _attends(model).state_dict().items()}
    size = model.config.hidden_size
    shapes |= {f"mtp.{name}.weight": (size,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes["mtp.fc.weight"] = (size, 2 * size)
    head = {n: torch.randn(s) * (s[-1] ** -0.5 if len(s) > 1 else 0.2) for n, s in shapes.items()}
    _add(folder, head)
    return TorchHead(model, head)


def make_knowing_head(family: str, folder: Path) -> list[int]:
    """Save a model whose next token depends on its newest only, with a head that tells it from the hidden state of the
    token before alone; returns the tokens of which the model's greedy outputs then consist, if the prompt's last one is
    one of them."""
    reference = make_checkpoint_with_head(family, folder)
    model, tensors = reference.model, reference.tensors
    stored = load_file(folder / FILE)
    still = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in (stored | tensors).items() if name.endswith(still)}
    model.load_state_dict(zeros, strict=False)
    vocab = torch.arange(model.config.vocab_size)
    with torch.no_grad():
        hidden = torch.cat([reference.hidden(token[None]) for token in vocab])
        after = model.lm_head(hidden).argmax(-1)
    cycle = set(vocab.tolist())
    for _ in vocab:
        cycle = {int(after[token]) for token in cycle}
    known = torch.tensor(sorted(cycle))
    size = hidden.shape[1]
    assert 1 < len(known) <= size
    blank = {f"mtp.{name}.weight": torch.zeros(size) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    normed = hidden / hidden.pow(2).mean(-1, keepdim=True).sqrt()
    embedded = model.model.embed_tokens.weight.detach()
    seen = torch.linalg.lstsq(normed[known], embedded[after[known]]).solution.T
    joined = torch.cat([torch.zeros(size, size), seen], dim=1)
    _add(folder, zeros | blank | {"mtp.fc.weight": joined, "mtp.norm.weight": stored["model.norm.weight"]})
    return known.tolist()


def _attends(model) -> torch.nn.Module:
    """The model's layer of full attention."""
    return model.model.layers[model.config.layer_types.index("full_attention")]


def _add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    whole = load_file(folder / FILE) | {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / FILE, metadata={"format": "pt"})
