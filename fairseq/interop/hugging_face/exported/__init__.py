"""Files that ``fairseq-export --to hf`` copies beside a language model; they need transformers, not
this package."""
