"""Evaluation of a model with its tokenizer: perplexity of texts, and tasks of lm-eval.

Tasks need the extra `twoaxis[evaluate]`; lm-eval is imported only for them.
"""

from twoaxis.interop.evaluate.perplexity import TextScore, score_texts, text_passage, total_score
from twoaxis.interop.evaluate.tasks import TaskFolder, open_tasks, run_tasks

__all__ = ["TaskFolder", "TextScore", "open_tasks", "run_tasks", "score_texts", "text_passage", "total_score"]
