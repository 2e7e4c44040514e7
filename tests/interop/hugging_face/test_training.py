"""Training in the tools of transformers: checkpointing, Trainer, LoRA."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra twoaxis[hf]")

from transformers import Trainer, TrainingArguments

from twoaxis.interop.hugging_face import TwoAxisForCausalLM, to_hugging_face

from ..hf_models import MODELS, assert_same, small_decoder

TOKENS = torch.tensor([[1, 7, 3, 9, 2, 11], [5, 5, 0, 8, 6, 4]])


def checkpointing(model: TwoAxisForCausalLM) -> None:
    """Turns it on by the name that this version of transformers has for it."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def gradients(model: TwoAxisForCausalLM) -> dict[str, torch.Tensor]:
    model.zero_grad()
    found = model(TOKENS, labels=TOKENS)
    assert not any(name in found for name in ("cache", "past_key_values"))
    found.loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_changes_no_gradient(name):
    model = to_hugging_face(small_decoder(name)).train()
    expected = gradients(model)
    runs: list[int] = []
    model.model.decoder.blocks[0].register_forward_pre_hook(lambda *_: runs.append(1))
    checkpointing(model)
    found = gradients(model)
    assert len(runs) == 2, "the block has to run again in the backward pass"
    assert expected.keys() == found.keys() and len(found) > 10
    assert all(torch.equal(found[name], expected[name]) for name in found)


class Repeats(torch.utils.data.Dataset):
    """Sentences that say the same token again and again, of different lengths."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": [index % 7 + 1] * (4 + index % 3)}


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pads on the right, as most collators do."""
    rows = [sample["input_ids"] for sample in samples]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trained(model: Any, folder: Any, **options: Any) -> list[float]:
    """Losses of a short training."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=12,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Repeats(), data_collator=collate)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_lowers_the_loss_and_saves(tmp_path):
    pytest.importorskip("accelerate", reason="needs the package accelerate")
    model = to_hugging_face(small_decoder("states").float()).train()
    losses = trained(model, tmp_path / "out")
    assert losses[-1] < 0.7 * losses[0]
    model.save_pretrained(tmp_path / "saved")
    again = TwoAxisForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same(again(TOKENS).logits, model.eval()(TOKENS).logits)


# What peft itself still asks for.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["streams", "views"])
def test_lora_trains_only_its_adapters_and_merges(name, tmp_path):
    pytest.importorskip("accelerate", reason="needs the package accelerate")
    peft = pytest.importorskip("peft", reason="needs the package peft")
    base = to_hugging_face(small_decoder(name).float())
    before = {name: value.clone() for name, value in base.state_dict().items()}
    config = peft.LoraConfig(r=4, target_modules=["qkv", "output", "gate_up", "down"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    losses = trained(model, tmp_path / "out")
    assert losses[-1] < losses[0]
    moved = {name: bool(value.any()) for name, value in model.named_parameters() if "lora_B" in name}
    assert len(moved) >= 8 and all(moved.values()), moved
    model.save_pretrained(tmp_path / "adapter")
    fresh = peft.PeftModel.from_pretrained(to_hugging_face(small_decoder(name).float()), tmp_path / "adapter")
    expected = model.eval()(TOKENS).logits
    assert_same(fresh.eval()(TOKENS).logits, expected)
    generated = model.generate(input_ids=TOKENS[:1], max_new_tokens=4, do_sample=False)
    assert generated.shape == (1, 10)
    with model.disable_adapter():
        plain = {name: value for name, value in model.get_base_model().state_dict().items() if "lora" not in name}
    assert all(torch.equal(value, before[name.replace("base_layer.", "")]) for name, value in plain.items())
    torch.testing.assert_close(model.merge_and_unload()(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
