"""Checkpoints with a head that predicts further tokens, and PyTorch's version of the head as it is published."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file

FILE = "model.safetensors"
QWEN = {
    "fc": "mtp.fc",
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "layer": "mtp.layers.0",
    "norm": "mtp.norm",
}


def of_further_layer(number: int) -> dict[str, str]:
    """The names of a head that is stored as one more layer."""
    layer = f"model.layers.{number}"
    names = {"fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"}
    return {part: f"{layer}.{name}" for part, name in names.items()} | {"layer": layer}


class TorchHead:
    """The published head on transformers' model: entry i joins token i + 1's embedding with the hidden state at i."""

    def __init__(self, model, tensors: dict[str, torch.Tensor], names: dict[str, str]):
        self.model = model
        self.tensors = tensors
        self.names = names
        self.offset = 1.0 if names is QWEN else 0.0
        self.layer = copy.deepcopy(_like_head(model)).eval()
        layer = f"{names['layer']}."
        parts = {name.removeprefix(layer): tensor for name, tensor in tensors.items() if name.startswith(layer)}
        self.layer.load_state_dict({name: parts[name] for name in self.layer.state_dict()})
        self.embedding = tensors.get(f"{layer}embed_tokens.weight", model.model.embed_tokens.weight.detach())
        self.table = tensors.get(f"{layer}shared_head.head.weight", model.lm_head.weight.detach())

    @torch.no_grad()
    def states(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The head's states of the entries of `tokens`, each of which follows the one that `hidden` is of."""
        joined = [self._norm("embedding_norm", self.embedding[tokens]), self._norm("hidden_norm", hidden)]
        x = (torch.cat(joined, dim=-1) @ self.tensors[f"{self.names['fc']}.weight"].T)[None]
        places = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        turned = self.model.model.rotary_emb(x, places)
        out = self.layer(x, position_embeddings=turned, attention_mask=mask, position_ids=places)
        return self._norm("norm", (out[0] if isinstance(out, tuple) else out)[0])

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the head's logits of the tokens after its states."""
        return states @ self.table.T

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
            tokens = torch.cat([tokens, self.logits(out[-1:]).argmax(-1)])
        return tokens[len(token_ids) :].tolist()

    def _norm(self, part: str, x: torch.Tensor) -> torch.Tensor:
        scale = self.offset + self.tensors[f"{self.names[part]}.weight"]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps) * scale


def make_checkpoint_with_head(family: str, folder: Path, *, own_tables: bool = False, **changes) -> TorchHead:
    """Save a tiny model with a random head; where it is one more layer, with the model's tables or some of its own."""
    model = make_checkpoint(family, folder, tie_word_embeddings=False, **changes)
    names = QWEN if family.startswith("qwen") else of_further_layer(model.config.num_hidden_layers)
    torch.manual_seed(5)
    layer, size = names["layer"], model.config.hidden_size
    shapes = {f"{layer}.{name}": tensor.shape for name, tensor in _like_head(model).state_dict().items()}
    shapes |= {f"{names[part]}.weight": (size,) for part in ("embedding_norm", "hidden_norm", "norm")}
    shapes[f"{names['fc']}.weight"] = (size, 2 * size)
    tables = {
        f"{layer}.embed_tokens.weight": model.model.embed_tokens,
        f"{layer}.shared_head.head.weight": model.lm_head,
    }
    if own_tables:
        shapes |= {name: table.weight.shape for name, table in tables.items()}
    head = {n: torch.randn(s) * (s[-1] ** -0.5 if len(s) > 1 else 0.2) for n, s in shapes.items()}
    if names is not QWEN:
        head |= {n: 1 + tensor for n, tensor in head.items() if tensor.ndim == 1 and "norm" in n}
        head = {n: table.weight.detach().clone() for n, table in tables.items()} | head
    _add(folder, head)
    return TorchHead(model, head, names)


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


def _like_head(model) -> torch.nn.Module:
    """The layer of the model that the head's is like: of full attention, and with experts if any layer has some."""
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    return model.model.layers[len(types) - 1 - types[::-1].index("full_attention")]


def _add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    whole = load_file(folder / FILE) | {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / FILE, metadata={"format": "pt"})
