"""Floor 5: trained models in files: formats that others publish, what these call our parameters, and retrofits.

Formats: `published_folder`, `configuration` (`config.json`), `gguf_file`, `source_files`. `layouts` maps parameter names, and
`retrofit` adds mixers to a trained model. transformers is not needed; GGUF files need the extra `twoaxis[gguf]`.
"""
