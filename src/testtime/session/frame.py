"""The table of answers as a DataFrame. Only imported where pandas is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from testtime.session.display import SHOWN, table_html

if TYPE_CHECKING:
    from testtime.session.classify import Answers


class Frame(pd.DataFrame):
    """A DataFrame that a notebook draws with thumbnails. What is made from it is a plain DataFrame."""

    answers: Answers | None = None  # the table that it was made of; lost where a frame is copied or pickled

    @classmethod
    def of(cls, answers: Answers) -> Frame:
        """The frame of a table."""
        frame = cls(answers.rows)
        object.__setattr__(frame, "answers", answers)  # pandas would take it for a column
        return frame

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame

    def _repr_html_(self) -> str:
        top = self.head(SHOWN).to_dict("records")
        return table_html(list(self.columns), top, self.answers.images if self.answers else {}, len(self))
