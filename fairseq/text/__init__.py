"""From and to what people read: text files, tokenizers, dictionaries."""
