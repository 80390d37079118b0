//! Columns for people.

use super::terminal::Colour;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// A text and the colour it is shown in.
#[derive(Clone, Debug)]
pub struct Cell(pub String, pub Colour);

impl Cell {
    pub fn plain(text: impl Into<String>) -> Cell {
        Cell(text.into(), Colour::Plain)
    }
}

/// Lines of equal columns; the last is not padded.
#[derive(Debug)]
pub struct Table {
    columns: Vec<(&'static str, Align)>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    pub fn new(columns: Vec<(&'static str, Align)>) -> Table {
        Table { columns, rows: Vec::new() }
    }

    pub fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(cells);
    }

    pub fn lines(&self) -> Vec<String> {
        let titles = self.columns.iter().map(|(title, _)| Cell((*title).to_owned(), Colour::Dim)).collect();
        let all: Vec<&Vec<Cell>> = std::iter::once(&titles).chain(&self.rows).collect();
        let len = |cell: &Cell| cell.0.chars().count();
        let width = |n: usize| all.iter().filter_map(|row| row.get(n)).map(len).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let line = |row: &&Vec<Cell>| {
            let mut out = String::new();
            let mut owed = 0;
            for ((cell, (_, align)), width) in row.iter().zip(&self.columns).zip(&widths) {
                let room = width.saturating_sub(len(cell));
                let before = if *align == Align::Right { room } else { 0 };
                if !cell.0.is_empty() {
                    out.push_str(&" ".repeat(owed + before));
                    out.push_str(&cell.1.paint(&cell.0));
                    owed = 2 + room - before;
                } else {
                    owed += 2 + room;
                }
            }
            out
        };
        all.iter().map(line).collect()
    }
}

/// A span of time as people say it, in two units at most.
pub fn span(ms: u64) -> String {
    let seconds = ms / 1_000;
    let two = |n: u64, unit: &str, rest: u64, small: &str| {
        if rest == 0 { format!("{n}{unit}") } else { format!("{n}{unit} {rest}{small}") }
    };
    match seconds {
        0 => format!("{ms}ms"),
        1..60 => format!("{seconds}s"),
        60..3_600 => two(seconds / 60, "m", seconds % 60, "s"),
        3_600..86_400 => two(seconds / 3_600, "h", seconds / 60 % 60, "m"),
        _ => two(seconds / 86_400, "d", seconds / 3_600 % 24, "h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(vec![("name", Align::Left), ("n", Align::Right), ("note", Align::Left)]);
        table.row(vec![Cell::plain("é"), Cell::plain("12"), Cell::plain("")]);
        table.row(vec![Cell::plain("longer"), Cell::plain(""), Cell::plain("x")]);
        assert_eq!(table.lines(), ["name     n  note", "é       12", "longer      x"]);
    }

    #[test]
    fn spans() {
        for (ms, text) in [
            (12, "12ms"),
            (59_999, "59s"),
            (60_000, "1m"),
            (3_599_000, "59m 59s"),
            (3_600_000, "1h"),
            (90_000_000, "1d 1h"),
        ] {
            assert_eq!(span(ms), text);
        }
    }
}
