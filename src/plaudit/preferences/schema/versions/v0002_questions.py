"""Questions apart from comparisons, and what a page on which people label needs: claims, reasons, taking back, keys."""

from collections import Counter

import sqlalchemy as sa
from alembic import op

from plaudit.preferences.order import priority

revision, down_revision = "0002", "0001"

KINDS = {
    "id": sa.Integer,
    "comparison_id": sa.Integer,
    "question_id": sa.Integer,
    "fingerprint": sa.String,
    "answers": sa.JSON,
    "annotator": sa.String,
    "kind": sa.String,
    "said": sa.String,
    "ranks": sa.JSON,
    "reason": sa.Text,
    "shown": sa.JSON,
    "seconds": sa.Float,
    "created": sa.String,
    "whole": sa.Boolean,
    "pair": sa.Boolean,
    "priority": sa.Float,
    "labels": sa.Integer,
}
KEPT = ("id", "annotator", "ranks", "shown", "seconds", "created")


def _table(name: str, *columns: str, **kinds: type) -> sa.TableClause:
    return sa.table(name, *(sa.column(c, (KINDS | kinds)[c]) for c in columns))


def upgrade() -> None:
    db = op.get_bind()
    op.create_table(
        "questions",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("comparison_id", sa.Integer, sa.ForeignKey("comparisons.id"), nullable=False),
        sa.Column("answers", sa.String(200), nullable=False),
        sa.Column("whole", sa.Boolean, nullable=False),
        sa.Column("pair", sa.Boolean, nullable=False),
        sa.Column("priority", sa.Float, nullable=False),
        sa.Column("labels", sa.Integer, nullable=False),
        sa.Column("known", sa.JSON),
        sa.UniqueConstraint("comparison_id", "answers"),
    )
    op.create_index("ix_questions_whole", "questions", ["whole", "labels", "priority"])
    op.create_index("ix_questions_pair", "questions", ["pair", "labels", "priority"])
    op.create_table(
        "claims",
        sa.Column("annotator", sa.String(200), primary_key=True),
        sa.Column("key", sa.String(40), nullable=False),
        sa.Column("question_id", sa.Integer, sa.ForeignKey("questions.id"), nullable=False, index=True),
        sa.Column("kind", sa.String(10), nullable=False),
        sa.Column("shown", sa.JSON, nullable=False),
        sa.Column("served", sa.Float, nullable=False),
        sa.Column("replaces", sa.Integer),
    )
    op.create_table(
        "secrets", sa.Column("name", sa.String(20), primary_key=True), sa.Column("value", sa.Text, nullable=False)
    )
    before = _table("preferences", *KEPT, "comparison_id")
    said = [dict(row._mapping) for row in db.execute(sa.select(before).order_by(before.c.id))]
    asked = list(db.execute(sa.select(_table("comparisons", "id", "fingerprint", "answers"))))
    op.drop_table("preferences")
    op.create_table(
        "preferences",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("question_id", sa.Integer, sa.ForeignKey("questions.id"), nullable=False, index=True),
        sa.Column("annotator", sa.String(200), nullable=False),
        sa.Column("kind", sa.String(10), nullable=False),
        sa.Column("said", sa.String(10), nullable=False),
        sa.Column("ranks", sa.JSON),
        sa.Column("ratings", sa.JSON),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("shown", sa.JSON, nullable=False),
        sa.Column("seconds", sa.Float, nullable=False),
        sa.Column("created", sa.String(40), nullable=False),
        sa.Column("withdrawn", sa.String(40)),
        sa.Column("key", sa.String(40), unique=True),
    )
    op.create_index("ix_preferences_annotator", "preferences", ["annotator", "question_id"])
    # a comparison's only question so far has its id
    counted = Counter(row["comparison_id"] for row in said)
    rows = [
        {
            "id": c.id,
            "comparison_id": c.id,
            "answers": ",".join(map(str, range(len(c.answers)))),
            "whole": True,
            "pair": len(c.answers) == 2,
            "priority": priority(c.fingerprint),
            "labels": counted[c.id],
        }
        for c in asked
    ]
    if rows:
        op.bulk_insert(_table("questions", *rows[0], answers=sa.String), rows)
    more = {"kind": "label", "said": "ranked", "reason": ""}
    labels = [{k: row[k] for k in KEPT} | {"question_id": row["comparison_id"]} | more for row in said]
    if labels:
        op.bulk_insert(_table("preferences", *labels[0]), labels)
