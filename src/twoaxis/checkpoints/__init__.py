"""Floor 5, below the others: trained models in files, and retrofits.

`published_folder`, `configuration` (`config.json`), `gguf_file` and `source_files` read published models, `layouts` maps their
parameter names to ours, and `retrofit` adds mixers to a trained model. GGUF files need the extra `twoaxis[gguf]`.
"""
