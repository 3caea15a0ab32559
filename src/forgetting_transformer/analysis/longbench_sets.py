"""LongBench's English sets: titles, groups, units and chance levels."""

#: The unit of an accuracy.
PERCENT = "accuracy (%)"
_SYNTHETIC = "Synthetic"
_F1, _ROUGE, _SIMILARITY, _RIGHT = "F1 of words (%)", "ROUGE-L (%)", "similarity of code (%)", "right numbers (%)"
#: LongBench's English sets, in the order of the paper's Table 2, and the two that are not in it: title, group and unit.
LONGBENCH = {
    "narrativeqa": ("NarrativeQA", "Single-Document QA", _F1),
    "qasper": ("Qasper", "Single-Document QA", _F1),
    "multifieldqa_en": ("MFQA", "Single-Document QA", _F1),
    "hotpotqa": ("HotpotQA", "Multi-Document QA", _F1),
    "2wikimqa": ("2WikiMQA", "Multi-Document QA", _F1),
    "musique": ("Musique", "Multi-Document QA", _F1),
    "gov_report": ("GovReport", "Summarization", _ROUGE),
    "qmsum": ("QMSum", "Summarization", _ROUGE),
    "multi_news": ("MultiNews", "Summarization", _ROUGE),
    "trec": ("TREC", "Few-shot Learning", PERCENT),
    "triviaqa": ("TriviaQA", "Few-shot Learning", _F1),
    "samsum": ("SamSum", "Few-shot Learning", _ROUGE),
    "lcc": ("LCC", "Code", _SIMILARITY),
    "repobench-p": ("RepoBench-P", "Code", _SIMILARITY),
    "passage_count": ("PassageCount", _SYNTHETIC, _RIGHT),
    "passage_retrieval_en": ("PassageRetrieval", _SYNTHETIC, _RIGHT),
}
# What guessing gives, where there is a list to choose from: 50 classes of questions, 30 paragraphs.
LONGBENCH_CHANCE = {"trec": 100 / 50, "passage_retrieval_en": 100 / 30}
#: The fourteen of the paper.
LONGBENCH_OF_PAPER = tuple(name for name, (_, group, _) in LONGBENCH.items() if group != _SYNTHETIC)
