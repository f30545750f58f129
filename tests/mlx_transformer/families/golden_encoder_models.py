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

ROBERTA = {**BERT, "model_type": "roberta", "pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
XLM_R = {**ROBERTA, "model_type": "xlm-roberta"}
DISTILBERT = dict(
    model_type="distilbert",
    **dict(vocab_size=40, n_layers=2, max_position_embeddings=26, pad_token_id=0, dim=16, n_heads=4, hidden_dim=20),
)
ODD_DISTILBERT = dict(dim=15, n_heads=5, hidden_dim=9, n_layers=3)
MODERNBERT = dict(
    model_type="modernbert",
    **dict(vocab_size=40, hidden_size=16, num_hidden_layers=4, num_attention_heads=4, intermediate_size=20),
    **dict(max_position_embeddings=26, pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2),
    **dict(local_attention=6, global_rope_theta=160000.0, local_rope_theta=100.0),
)
BIASED = dict(attention_bias=True, mlp_bias=True, norm_bias=True, classifier_bias=True)
BIASED |= dict(hidden_size=24, num_attention_heads=3, intermediate_size=9, num_hidden_layers=5)

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
    "roberta": {**ROBERTA, "architectures": ["RobertaModel"]},
    "roberta-words": {**ROBERTA, **ODD, "architectures": ["RobertaForMaskedLM"], "hidden_act": "relu"}
    | dict(type_vocab_size=3, pad_token_id=3),
    "roberta-untied": {**ROBERTA, "architectures": ["RobertaForMaskedLM"], "tie_word_embeddings": False},
    "roberta-classes": {**ROBERTA, **LABELS, "architectures": ["RobertaForSequenceClassification"]},
    "roberta-spans": {**ROBERTA, **ODD, "architectures": ["RobertaForQuestionAnswering"], "hidden_act": "gelu_new"},
    "xlm-r": {**XLM_R, "architectures": ["XLMRobertaModel"], "pooler": False, "max_position_embeddings": 150},
    "xlm-r-words": {**XLM_R, "architectures": ["XLMRobertaForMaskedLM"], "pad_token_id": 0, "type_vocab_size": 2},
    "xlm-r-tokens": {**XLM_R, **LABELS, **ODD, "architectures": ["XLMRobertaForTokenClassification"]},
    "distilbert": {**DISTILBERT, "architectures": ["DistilBertModel"]},
    "distilbert-words": {**DISTILBERT, **ODD_DISTILBERT, "architectures": ["DistilBertForMaskedLM"]},
    "distilbert-untied": {**DISTILBERT, "architectures": ["DistilBertForMaskedLM"], "tie_word_embeddings": False}
    | dict(activation="relu", pad_token_id=5),
    "distilbert-classes": {**DISTILBERT, **LABELS, "architectures": ["DistilBertForSequenceClassification"]},
    "distilbert-tokens": {**DISTILBERT, **LABELS, "architectures": ["DistilBertForTokenClassification"]}
    | dict(max_position_embeddings=150, n_heads=1),
    "modernbert": {**MODERNBERT, "architectures": ["ModernBertModel"]},
    "modernbert-words": {**MODERNBERT, "architectures": ["ModernBertForMaskedLM"], "global_attn_every_n_layers": 2},
    "modernbert-untied": {**MODERNBERT, **BIASED, "architectures": ["ModernBertForMaskedLM"]}
    | dict(tie_word_embeddings=False, decoder_bias=False, local_attention=2),
    "modernbert-classes": {**MODERNBERT, **LABELS, "architectures": ["ModernBertForSequenceClassification"]}
    | dict(hidden_activation="silu", classifier_activation="tanh"),
    "modernbert-mean": {**MODERNBERT, **BIASED, **LABELS, "architectures": ["ModernBertForSequenceClassification"]}
    | dict(classifier_pooling="mean", num_hidden_layers=1),
    "modernbert-tokens": {**MODERNBERT, **LABELS, "architectures": ["ModernBertForTokenClassification"]}
    | dict(local_attention=128, max_position_embeddings=150, pad_token_id=3),
    "modernbert-spans": {**MODERNBERT, "architectures": ["ModernBertForQuestionAnswering"], "local_attention": 7}
    | dict(global_attn_every_n_layers=1),
    "distilbert-spans": {**DISTILBERT, **ODD_DISTILBERT, "architectures": ["DistilBertForQuestionAnswering"]},
}
