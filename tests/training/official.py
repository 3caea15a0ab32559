"""A folder as the authors' training code leaves it, made of a run of this project."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from omegaconf import OmegaConf

from forgetting_transformer.training.checkpoint.folder import newest_valid
from forgetting_transformer.training.checkpoint.reading import load_tensors
from forgetting_transformer.training.config import Config
from forgetting_transformer.training.config.parsing import parse
from forgetting_transformer.training.export import load_checkpoint
from forgetting_transformer.training.optimization.building import undecayed_parameters

PACKAGE = "forgetting_transformer"


def official_run(run: Path, folder: Path, step: int, numbered: bool = False) -> Path:
    """Writes config.yaml and checkpoints/step-*.pt with its .done into `folder`; returns the .pt.

    Args:
        run: output_dir of a run of this project. step: training tokens of one of its checkpoints.
        numbered: parameters of the optimizer by number, as under DDP, and not by name, as under FSDP.
    """
    checkpoint, state, model = load_checkpoint(newest_valid(run / "checkpoints", step))
    tensors, windows = load_tensors(checkpoint), checkpoint.callback_state()
    config = parse(OmegaConf.create(state["config"]))
    undecayed = undecayed_parameters(model, config.train)
    names = [name for name, _ in model.named_parameters()]
    groups = [[n for n in names if n not in undecayed], [n for n in names if n in undecayed]]
    ids: dict[str, Any] = {name: name for name in names}
    if numbered:
        ids = {name: number for number, name in enumerate(groups[0] + groups[1])}
    moments = ("step", "exp_avg", "exp_avg_sq")
    saved = {
        "model": {name: tensors[f"model.{name}"] for name in model.state_dict()},
        "optimizer": {
            "state": {ids[n]: {m: tensors[f"optimizer.state.{n}.{m}"] for m in moments} for n in names},
            "param_groups": [{"lr": 0.5, "betas": (0.9, 0.95), "params": [ids[n] for n in group]} for group in groups],
        },
        "train_dataloader": {"batch_id": 3},
        **{name: state[name] for name in ("token_count", "batch_count", "total_time", "update_time")},
        "flop_count": 0,
        "window_loss_per_token": np.asarray(windows["loss_by_position.loss_T"]),
        "window_seq_count": int(windows["loss_by_position.sequences"].max()),
    }
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    file = folder / f"checkpoints/step-{step:015d}.pt"
    torch.save(saved, file)
    file.with_name(f"{file.name}.done").touch()
    (folder / "config.yaml").write_text(yaml.safe_dump(official_config(config, folder), sort_keys=False))
    return file


def official_config(config: Config, folder: Path) -> dict[str, Any]:
    data, schedule = vars(config.datamodule), config.schedule
    same = ("exp", "tag", "seed", "log_interval", "train_eval_interval", "eval_interval", "skip_eval", "final_eval",
            "checkpoint_interval", "checkpoint_keep_interval", "data_dir")  # fmt: skip
    train = ("max_tokens", "grad_acc_tokens", "max_grad_norm", "gradient_checkpointing", "bias_weight_decay",
             "normalization_weight_decay", "conv_weight_decay")  # fmt: skip
    batches = ("train_batch_len", "train_batch_size", "train_num_workers", "eval_tokens", "eval_batch_len",
               "eval_local_batch_size", "eval_num_workers")  # fmt: skip
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "max_position_embeddings"))
    fields = {"vocab_size": "???", "use_rope": False, **none}
    return {
        **{name: getattr(config, name) for name in same},
        "hf_load_dir": None, "hf_save_dir": None, "hf_load_step": None, "fork_dir": None, "fork_step": None,
        "resume": True, "output_dir": str(folder),
        "fabric": {"devices": "auto", "precision": config.fabric.precision},
        "train": {name: getattr(config.train, name) for name in train},
        "eval": {"min_val_length": config.eval.min_val_length},
        "wandb": {"project": "forgetting-transformer", "mode": "offline", "log_dir": str(folder)},
        "strategy": {
            "_target_": "lightning.fabric.strategies.FSDPStrategy", "state_dict_type": "full",
            "sharding_strategy": "FULL_SHARD", "cpu_offload": False,
        },
        "model": {
            "_target_": f"{PACKAGE}.model.{PACKAGE}.modeling_{PACKAGE}.ForgettingTransformerForCausalLM",
            "config": {"_target_": f"{PACKAGE}.model.{PACKAGE}.configuration_{PACKAGE}.ForgettingTransformerConfig",
                       **fields, **config.model.config},
        },
        "schedule": {
            "_target_": f"{PACKAGE}.schedule.warmup_cosine_decay_schedule", "init_value": schedule.init_lr,
            "peak_value": config.optimizer.lr, "warmup_steps": schedule.warmup_tokens,
            "decay_steps": schedule.total_tokens, "end_value": schedule.end_lr,
        },
        "datamodule": {
            "_target_": f"{PACKAGE}.datamodule.{config.datamodule.dataset}.{config.datamodule.dataset}DataModule",
            "data_dir": f"{config.data_dir}/longcrawl64", "rank": "???", "world_size": "???",
            "train_seq_len": None, "train_doc_len": None, "eval_seq_len": None, "eval_doc_len": None,
            **{name: data[name] for name in batches},
        },
        "optimizer": {
            "_target_": "torch.optim.AdamW", "lr": config.optimizer.lr, "betas": config.optimizer.betas,
            "weight_decay": config.optimizer.weight_decay,
        },
    }  # fmt: skip
