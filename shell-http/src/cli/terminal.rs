//! Colours and progress: on a terminal as a person likes it, elsewhere plain.

use std::io::{IsTerminal as _, Write as _};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use clap::ValueEnum;

/// A bar is drawn at most this often; plain lines come at these intervals.
const REDRAW: Duration = Duration::from_millis(100);
const LINES: Duration = Duration::from_secs(10);
/// Characters of a bar.
const BAR: usize = 30;
/// Back to the first column, and nothing to the right.
const CLEAR: &str = "\r\u{1b}[K";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum When {
    Auto,
    Always,
    Never,
}

static CHOSEN: OnceLock<When> = OnceLock::new();

/// What `--color` says; the first call counts.
pub fn choose(when: When) {
    CHOSEN.get_or_init(|| when);
}

fn is_coloured(when: When, is_terminal: bool, no_color: Option<&str>, term: Option<&str>) -> bool {
    match when {
        When::Always => true,
        When::Never => false,
        // https://no-color.org: set and not empty.
        When::Auto => is_terminal && no_color.is_none_or(str::is_empty) && term != Some("dumb"),
    }
}

fn env(name: &str) -> Option<String> {
    std::env::var_os(name).map(|v| v.to_string_lossy().into_owned())
}

/// Whether standard output is coloured.
fn colours() -> bool {
    static COLOURS: OnceLock<bool> = OnceLock::new();
    *COLOURS.get_or_init(|| {
        let when = CHOSEN.get().copied().unwrap_or(When::Auto);
        is_coloured(when, std::io::stdout().is_terminal(), env("NO_COLOR").as_deref(), env("TERM").as_deref())
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    Plain,
    Bold,
    Dim,
    Red,
    Green,
    Yellow,
    Cyan,
}

impl Colour {
    /// Of a job's status, or of an event.
    pub fn of_status(status: &str) -> Colour {
        match status {
            "succeeded" => Colour::Green,
            "dead" | "expired" | "lost" | "quarantined" => Colour::Red,
            "retrying" | "cancelled" | "lease_expired" | "timed_out" | "failed" => Colour::Yellow,
            "running" | "claimed" => Colour::Cyan,
            _ => Colour::Plain,
        }
    }

    /// The text in this colour, if standard output has colours.
    pub fn paint(self, text: &str) -> String {
        let code = match self {
            Colour::Plain => return text.to_owned(),
            Colour::Bold => 1,
            Colour::Dim => 2,
            Colour::Red => 31,
            Colour::Green => 32,
            Colour::Yellow => 33,
            Colour::Cyan => 36,
        };
        if colours() { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}

/// Text from a server as it can safely stand on a terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// Makes room for a picture that replaces the one before, on a terminal; else leaves a line empty.
pub fn next_picture(first: bool) -> String {
    match (std::io::stdout().is_terminal() && env("TERM").as_deref() != Some("dumb"), first) {
        (true, _) => "\u{1b}[H\u{1b}[2J".into(),
        (false, true) => String::new(),
        (false, false) => "\n".into(),
    }
}

/// How progress is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Bar,
    Lines,
    Not,
}

/// How far something has come, on standard error: a bar if that is a terminal, else a plain line
/// now and then.
#[derive(Debug)]
pub struct Progress {
    what: &'static str,
    total: Option<u64>,
    done: u64,
    failed: u64,
    shown: Shown,
    begun: Instant,
    last: Instant,
    drawn: bool,
    said: bool,
    /// What else there is to say.
    note: String,
}

impl Progress {
    pub fn new(what: &'static str, total: Option<u64>, quiet: bool) -> Self {
        let shown = if quiet {
            Shown::Not
        } else if std::io::stderr().is_terminal() && env("TERM").as_deref() != Some("dumb") {
            Shown::Bar
        } else {
            Shown::Lines
        };
        let now = Instant::now();
        Progress {
            what,
            total,
            done: 0,
            failed: 0,
            shown,
            begun: now,
            last: now,
            drawn: false,
            said: false,
            note: String::new(),
        }
    }

    /// So many are through, so many of them not well; and what else there is to say.
    pub fn show(&mut self, done: u64, failed: u64, note: String) {
        (self.done, self.failed, self.note) = (done, failed, note);
        self.tick();
    }

    /// One more is through.
    pub fn count(&mut self, well: bool) {
        self.done += 1;
        self.failed += u64::from(!well);
        self.tick();
    }

    /// So many more are through.
    pub fn add(&mut self, n: u64) {
        self.done += n;
        self.tick();
    }

    pub fn done(&self) -> u64 {
        self.done
    }

    /// Shows it if it is time.
    pub fn tick(&mut self) {
        if let Some(text) = self.due(Instant::now()) {
            // Whoever watched may be gone.
            let _ = write!(std::io::stderr().lock(), "{text}");
        }
    }

    fn due(&mut self, now: Instant) -> Option<String> {
        let every = match self.shown {
            Shown::Not => return None,
            Shown::Bar => REDRAW,
            Shown::Lines => LINES,
        };
        if now.saturating_duration_since(self.last) < every {
            return None;
        }
        self.last = now;
        if self.shown == Shown::Bar {
            self.drawn = true;
            return Some(format!("{CLEAR}{}", self.bar(now)));
        }
        self.said = true;
        Some(format!("leasehold: {}\n", self.text()))
    }

    /// Takes the bar away, so that something else can be printed.
    pub fn clear(&mut self) {
        if std::mem::take(&mut self.drawn) {
            let _ = write!(std::io::stderr().lock(), "{CLEAR}");
        }
    }

    /// The last word, if there was an earlier one.
    pub fn end(&mut self) {
        let drawn = self.drawn;
        self.clear();
        if drawn || self.said {
            let took = self.begun.elapsed().as_secs_f64();
            let _ = writeln!(std::io::stderr().lock(), "leasehold: {} in {took:.1} s", self.text());
        }
    }

    fn text(&self) -> String {
        let of = self.total.map(|t| format!(" of {t}")).unwrap_or_default();
        let failed = if self.failed > 0 { format!(", {} not well", self.failed) } else { String::new() };
        let note = if self.note.is_empty() { String::new() } else { format!(" ({})", self.note) };
        format!("{}{of} {}{failed}{note}", self.done, self.what)
    }

    fn bar(&self, now: Instant) -> String {
        let seconds = now.saturating_duration_since(self.begun).as_secs_f64();
        let rate = if seconds > 0.0 { self.done as f64 / seconds } else { 0.0 };
        match self.total {
            Some(total) if total > 0 => {
                let full = usize::try_from(self.done.min(total) * BAR as u64 / total).unwrap_or(BAR);
                let (full, rest) = ("#".repeat(full), "-".repeat(BAR - full));
                format!("[{full}{rest}] {}, {rate:.0}/s", self.text())
            }
            _ => format!("{}, {rate:.0}/s", self.text()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn when_there_are_colours() {
        assert!(is_coloured(When::Auto, true, None, Some("xterm")));
        assert!(is_coloured(When::Auto, true, Some(""), None));
        assert!(!is_coloured(When::Auto, true, Some("1"), Some("xterm")));
        assert!(!is_coloured(When::Auto, true, None, Some("dumb")));
        assert!(!is_coloured(When::Auto, false, None, Some("xterm")));
        assert!(is_coloured(When::Always, false, Some("1"), Some("dumb")));
        assert!(!is_coloured(When::Never, true, None, Some("xterm")));
    }

    #[test]
    fn a_bar_is_redrawn_in_place_and_lines_come_seldom() {
        let begun = Instant::now();
        let progress = |shown| Progress {
            what: "submitted",
            total: Some(4),
            done: 0,
            failed: 0,
            shown,
            begun,
            last: begun,
            drawn: false,
            said: false,
            note: String::new(),
        };
        let after = |ms| begun + Duration::from_millis(ms);
        let mut bar = progress(Shown::Bar);
        bar.done = 1;
        assert_eq!(bar.due(after(50)), None);
        let text = bar.due(after(500)).unwrap();
        assert_eq!(text, format!("{CLEAR}[{}{}] 1 of 4 submitted, 2/s", "#".repeat(7), "-".repeat(23)));
        let mut lines = progress(Shown::Lines);
        (lines.done, lines.failed) = (2, 1);
        assert_eq!(lines.due(after(9_999)), None);
        assert_eq!(lines.due(after(10_000)).unwrap(), "leasehold: 2 of 4 submitted, 1 not well\n");
        assert_eq!(lines.due(after(19_000)), None);
        assert_eq!(progress(Shown::Not).due(after(60_000)), None);
    }

    #[test]
    fn what_a_server_says_cannot_move_the_cursor() {
        assert_eq!(printable("a\u{1b}[2Jb\n"), "a\u{fffd}[2Jb\u{fffd}");
    }
}
