"""Indexes that hold just what is waiting and what is known, so that large stores stay quick."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0003", "0002"


def upgrade() -> None:
    for mode in ("whole", "pair"):
        op.drop_index(f"ix_questions_{mode}", "questions")
        op.create_index(
            f"ix_questions_{mode}",
            "questions",
            ["labels", "priority"],
            sqlite_where=sa.text(f"{mode} = 1 AND known IS NULL"),
            postgresql_where=sa.text(f"{mode} AND known IS NULL"),
        )
    known = sa.text("known IS NOT NULL")
    op.create_index("ix_questions_known", "questions", ["id"], sqlite_where=known, postgresql_where=known)
