"""Transformers' Trainer, told what a recipe says."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from aft.training.errors import RunError
from aft.training.interrupts import StopRequest, StopWhenAsked
from aft.training.recipes import Pace, Recipe
from aft.training.reporting import Reporter
from aft.training.rundir import CHECKPOINTS, STAGING, adopt_checkpoint, saving
from aft.training.scores import Score
from aft.training.tasks import Task


def training_arguments(recipe: Recipe, pace: Pace, workers: int, run: Path) -> TrainingArguments:
    """The Trainer's arguments for a recipe: its device and processes are the Trainer's own choice."""
    min_lr = recipe.lr / 10 if recipe.min_lr is None else recipe.min_lr
    cosine = recipe.schedule == "cosine"
    arguments = TrainingArguments(
        output_dir=str(run / CHECKPOINTS),
        max_steps=pace.steps,
        optim="adamw_torch_fused",  # looping over a small model's parameters costs more than the arithmetic
        learning_rate=recipe.lr,
        weight_decay=recipe.weight_decay,
        adam_beta1=recipe.beta1,
        adam_beta2=recipe.beta2,
        max_grad_norm=recipe.grad_clip,
        # Of the two cosines that end at a minimum this one does not spend its first step at a rate of 0.
        lr_scheduler_type="cosine_warmup_with_min_lr" if cosine else "constant_with_warmup",
        lr_scheduler_kwargs={"min_lr_rate": min_lr / recipe.lr} if cosine else {},
        warmup_steps=pace.warmup_steps,
        seed=recipe.seed,
        data_seed=recipe.seed,
        # Said out loud, or the Trainer neither starts processes on a CPU nor takes bfloat16 there.
        use_cpu=not torch.accelerator.is_available(),
        bf16=recipe.precision == "bfloat16",
        logging_steps=recipe.log_every,
        logging_nan_inf_filter=False,  # it waits for the device at every step, and hides divergence
        eval_strategy="steps" if pace.eval_every else "no",
        eval_steps=pace.eval_every or None,
        save_strategy="steps",
        save_steps=pace.save_every or pace.steps,
        dataloader_num_workers=workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to=[],
        log_level="error",
        log_level_replica="error",
    )
    shares = arguments.world_size * max(1, arguments.n_gpu)
    if recipe.batch_size % shares:
        raise RunError(
            f"batch_size is {recipe.batch_size}; expected a multiple of the {shares} devices in use"
        )
    arguments.per_device_train_batch_size = recipe.batch_size // shares
    return arguments


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weights of linear and convolution layers with decay; all else without: embeddings, norms, biases, AFT's
    position biases and kernels.

    A tied output layer shares the embedding's tensor, and is left without decay as the embedding is.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    weighing = (nn.Linear, nn.Conv1d, nn.Conv2d)
    decayed = {id(module.weight) for module in model.modules() if isinstance(module, weighing)} - embeddings
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if id(p) in decayed], "weight_decay": weight_decay},
        {"params": [p for p in parameters if id(p) not in decayed], "weight_decay": 0.0},
    ]


class TaskTrainer(Trainer):
    """Draws what the task draws, decays some weights only, scores exactly, saves whole or not at all."""

    def __init__(
        self,
        model: PreTrainedModel,
        run: Path,
        task: Task,
        arguments: TrainingArguments,
        reporter: Reporter,
        request: StopRequest,
    ) -> None:
        self.task = task
        self.reporter = reporter
        self.run = run
        self._saves_to = str(run / CHECKPOINTS)
        shares = arguments.world_size * max(1, arguments.n_gpu)
        self._draws = arguments.max_steps * arguments.per_device_train_batch_size * shares
        # The Trainer writes its own idea of a cache into the model's configuration, which is then saved.
        arguments.use_cache = getattr(model.config, "use_cache", False)
        super().__init__(
            model=model,
            args=arguments,
            data_collator=task.collator(),
            train_dataset=task.train_set(self._draws),
            eval_dataset=[],  # asked for where eval_strategy is "steps"; `evaluate` asks the task instead
            callbacks=[StopWhenAsked(request), reporter],
        )
        self.remove_callback(PrinterCallback)
        # Our losses are means. Where a model takes any keyword and a batch has `labels`, the Trainer would
        # take them for sums over tokens and multiply them by the number of processes.
        self.model_accepts_loss_kwargs = False

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            wrapped = self.model if model is None else model
            assert isinstance(wrapped, nn.Module)
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer = optimizer_class(parameter_groups(wrapped, self.args.weight_decay), **options)
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return self.task.sampler(self.train_dataset, self._draws)  # type: ignore[arg-type]

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # the Trainer's estimate counts all parameters anew at every step

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Score some of what is held out; at the last step nothing: the whole follows."""
        if self.state.global_step >= self.args.max_steps:
            return {}
        with self.reporter.stopwatch.pause():
            result = self.score_held_out(whole=False)
        self.reporter.validation(self.state.global_step, self.task.held_out, result, final=False)
        return {f"eval_{result.measure.name}": result.main}

    def score_held_out(self, *, whole: bool) -> Score:
        """The exact score of the held-out part, or of some of it, each process taking its share."""
        model = self.accelerator.unwrap_model(self.model)
        assert isinstance(model, PreTrainedModel)
        rank, world_size = self.args.process_index, self.args.world_size
        mine = self.task.score(model, whole=whole, rank=rank, world_size=world_size)
        if world_size == 1:
            return mine
        sums = torch.tensor(mine.sums(), dtype=torch.float64, device=self.args.device)
        return type(mine).of_sums(self.accelerator.reduce(sums, reduction="sum").tolist())

    def _get_output_dir(self, trial: Any) -> str:
        return self._saves_to

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save into the staging folder, then move the checkpoint to its place when all processes are done."""
        staging = self.run / CHECKPOINTS / STAGING
        with (
            self.reporter.stopwatch.pause(),
            saving(self.run / CHECKPOINTS / f"checkpoint-{self.state.global_step}"),
        ):
            self._saves_to = str(staging)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._saves_to = str(self.run / CHECKPOINTS)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                adopt_checkpoint(self.run, staging / f"checkpoint-{self.state.global_step}")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Weights as safetensors and configurations as JSON; no pickled arguments, which the Trainer adds."""
        if self.args.should_save:
            folder = output_dir or self._saves_to
            os.makedirs(folder, exist_ok=True)
            model = self.accelerator.unwrap_model(self.model)
            assert isinstance(model, PreTrainedModel)
            model.save_pretrained(folder, state_dict=state_dict)
            self.task.save_processor(Path(folder))
