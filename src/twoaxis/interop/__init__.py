"""Floor 5: models of other libraries, and other libraries around models of ours.

`retrofit` adds mixers to trained models, `evaluation` measures models on texts and tasks, `serving` answers requests, and
`outside_engines` says what vLLM and its like can run. Only here are transformers, lm-eval, fastapi and torchtitan imported, and
only by what needs them: `hugging_face` asks for the extra `twoaxis[hf]`, tasks for `evaluate`, the server for `serve`.
"""
