"""Reads the tables that figures are drawn from, and checks every cell that is drawn

Here belongs the reading of one CSV file that its user may have edited. Which columns a figure needs
belongs in the module that draws it.
"""

from typing import Annotated

from pydantic import BeforeValidator, Field

from ..base.settings import Number, checked, number_from_text
from ..base.tools import one_line, require_fields

Name = Annotated[str, Field(min_length=1)]
WholeNumber = Annotated[Number, Field(ge=1, multiple_of=1)]  # 600.0, too
Amount = Annotated[Number, Field(ge=0)]
Percentage = Annotated[Number, Field(ge=0, le=100)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
Flag = Annotated[Fraction, Field(multiple_of=1)]
Inches = Annotated[Number, Field(gt=0, le=50)]
PointSize = Annotated[Number, Field(gt=0, le=50)]
# As a multiple of the large model's cost. No method costs so much: a larger number is in percent.
CostShare = Annotated[Number, Field(ge=0, le=25)]
# An infinite number has a meaning.
Unbounded = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(number_from_text)]


def table_error(path, reason) -> ValueError:
    "The error about a table: which file, what is wrong, what to do. The caller raises it."
    return ValueError(
        f'{path}: {one_line(reason)}; '
        'correct the file, or write the tables again with stepwise-routing reproduce'
    )


def check_intervals(path, table, name: str) -> None:
    "ValueError if a value of a column is outside of its interval, the columns name_low and name_high."
    low, value, high = (table[f'{name}{end}'] for end in ('_low', '', '_high'))
    for row in table.index[(low > value) | (value > high)]:
        raise table_error(path, f'row {row + 2}: {name} is outside of its interval')


def read_table(
    path,  # CSV file
    kinds: dict,  # column that is needed -> annotated type of its cells; an empty cell is None
):  # DataFrame
    """Read a table that may have been edited.

    ValueError in one line if it cannot be drawn. FileNotFoundError if it is missing.
    """
    import pandas as pd

    if not path.is_file():
        raise FileNotFoundError(
            f'{path} is missing: write the tables again with stepwise-routing reproduce'
        )
    try:
        frame = pd.read_csv(path)
        if not path.read_text('utf-8').endswith('\n'):
            raise ValueError('it is cut off')
        require_fields(dict(frame), kinds)
        # pandas takes the first cells of longer rows for names of the rows
        if 0 not in frame.index[:1]:
            raise ValueError('no rows, or rows with more cells than the first line')
        for column, kind in kinds.items():
            for row, value in enumerate(frame[column], 2):
                is_filled = value == value  # an empty cell is nan
                checked(f'row {row}: {column}', value if is_filled else None, kind)
    except ValueError as error:  # one of pandas, too
        raise table_error(path, error) from None
    return frame
