"""The encoders of the golden folders, by their config: of each family several, with sizes that differ, a head each."""

from __future__ import annotations

SIZES = dict(vocab_size=40, num_hidden_layers=2, max_position_embeddings=26, pad_token_id=0)
BERT = dict(
    model_type="bert",
    **SIZES,
    **dict(hidden_size=16, num_attention_heads=4, intermediate_size=20, type_vocab_size=2),
)
ODD = dict(hidden_size=15, num_attention_heads=3, intermediate_size=9, num_hidden_layers=3)
LABELS = {"id2label": {0: "bad", 1: "fair", 2: "good"}}

MODELS = {
    "bert": {**BERT, "architectures": ["BertModel"]},
    "bert-hidden": {
        **BERT,
        **ODD,
        "pooler": False,
        "architectures": ["BertModel"],
        "type_vocab_size": 1,
        "hidden_act": "gelu_new",
    },
    "bert-words": {**BERT, "architectures": ["BertForMaskedLM"], "type_vocab_size": 3, "layer_norm_eps": 1e-5},
    "bert-untied": {**BERT, **ODD, "architectures": ["BertForMaskedLM"], "tie_word_embeddings": False}
    | dict(hidden_act="relu", pad_token_id=3),
    "bert-pretrained": {**BERT, "architectures": ["BertForPreTraining"], "hidden_act": "silu"},
    "bert-classes": {**BERT, **ODD, **LABELS, "architectures": ["BertForSequenceClassification"]},
    "bert-tokens": {**BERT, **LABELS, "architectures": ["BertForTokenClassification"], "max_position_embeddings": 150},
    "bert-spans": {**BERT, "architectures": ["BertForQuestionAnswering"], "num_attention_heads": 1},
}
