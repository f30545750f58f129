"""Two models, precisions or runtimes on the same text: scores, sentences that differ, speed, memory, sizes."""
