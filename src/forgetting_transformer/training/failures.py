"""One run from its config to its end, in which whatever goes wrong ends in one line that says what to do."""

from forgetting_transformer.training import status
from forgetting_transformer.training.config import Config
from forgetting_transformer.training.errors import TrainingError
from forgetting_transformer.training.feed import DataWorkerError
from forgetting_transformer.training.peers import Peers
from forgetting_transformer.training.run_directory import RunDirectory, describe_os_error
from forgetting_transformer.training.sentinel import Sentinel
from forgetting_transformer.training.trainer import Trainer


def train(config: Config) -> str:
    """Trains one model, from its newest checkpoint or from the start, to `train.max_tokens`.

    Returns:
        "done", or "preempted" if a signal stopped it; then the same config continues it.
    """
    directory = RunDirectory(config.output_dir)
    with Sentinel(config.strategy.timeout_seconds) as sentinel:
        sentinel.on_end = lambda reason: status.end(directory, reason)
        peers = Peers()
        try:
            trainer = Trainer(config, sentinel, directory, peers)
        except BaseException as error:
            problem = error
            if isinstance(error, OSError):  # a full disk, or one that went away
                where = describe_os_error(error, directory.root)
                problem = TrainingError(f"cannot start: {where}. Mend this and start the same command again")
            elif (blame := peers.explain(error)) is not None:
                problem = TrainingError(f"cannot start: {blame}. Start the same command again")
            reason = f"{type(problem).__name__}: {problem}"
            peers.failed(reason)
            status.end(directory, reason)
            raise problem from (None if problem is error else error)
        try:
            outcome = trainer.run()
            trainer.close()
            # So that no launcher takes an early rank's end for a reason to end the others.
            trainer.vote.wait_for_all()
            return outcome
        except (OSError, DataWorkerError) as error:
            # A full disk, a file system that went away, readers that die. Checkpoints that could be skipped have been.
            trainer.saver.wait_for_save()
            reason = describe_os_error(error, directory.root) if isinstance(error, OSError) else str(error)
            last_good = trainer.saver.last_good_checkpoint
            problem = TrainingError(f"{reason}; {last_good}. Mend this and start the same command again")
            trainer.failed(problem)
            raise problem from error
        except Exception as error:
            if (blame := peers.explain(error)) is not None:
                last_good = trainer.saver.last_good_checkpoint
                problem = TrainingError(f"{blame}; {last_good}. Start the same command again")
                trainer.failed(problem)
                raise problem from error
            trainer.failed(error)
            raise
        finally:
            trainer.close()
