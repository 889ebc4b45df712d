"""Between text and token ids: tokenizers, chat templates, control tokens, and the lines of an interactive terminal."""
