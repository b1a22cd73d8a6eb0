"""The application: pretrain a GPT-2 with marsopt on torchtitan."""
