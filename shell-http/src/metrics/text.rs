//! Prometheus' text format, version 0.0.4.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The page being written. A metric is begun once, and all of its samples follow.
#[derive(Debug, Default)]
pub struct Page {
    text: String,
    name: &'static str,
}

impl Page {
    pub fn new() -> Self {
        Page { text: String::with_capacity(32 * 1024), name: "" }
    }

    /// Begins a metric: its samples follow.
    pub fn begin(&mut self, name: &'static str, kind: &str, help: &str) {
        self.name = name;
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// A sample of the metric begun last.
    pub fn sample(&mut self, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        self.part("", labels, None, value);
    }

    /// A metric with a single sample.
    pub fn one(&mut self, name: &'static str, kind: &str, help: &str, value: impl std::fmt::Display) {
        self.begin(name, kind, help);
        self.sample(&[], value);
    }

    /// The samples of one histogram of the metric begun last.
    pub fn histogram(&mut self, labels: &[(&str, &str)], histogram: &Histogram) {
        let counts = histogram.buckets.iter().map(|b| b.load(Relaxed));
        self.buckets(labels, histogram.shape.ends, histogram.shape.scale, counts, histogram.sum.load(Relaxed));
    }

    /// A histogram from what was counted up to each end, and above the last.
    pub fn buckets(
        &mut self,
        labels: &[(&str, &str)],
        ends: &[u64],
        scale: f64,
        counts: impl IntoIterator<Item = u64>,
        sum: u64,
    ) {
        let mut counts = counts.into_iter();
        let mut total = 0;
        for (end, count) in ends.iter().zip(&mut counts) {
            total += count;
            self.part("_bucket", labels, Some(&format!("{}", *end as f64 / scale)), total);
        }
        total += counts.sum::<u64>();
        self.part("_bucket", labels, Some("+Inf"), total);
        self.part("_sum", labels, None, sum as f64 / scale);
        self.part("_count", labels, None, total);
    }

    fn part(&mut self, suffix: &str, labels: &[(&str, &str)], le: Option<&str>, value: impl std::fmt::Display) {
        self.text.push_str(self.name);
        self.text.push_str(suffix);
        let all = labels.iter().copied().chain(le.map(|le| ("le", le)));
        let mut open = '{';
        for (key, value) in all {
            self.text.push(open);
            self.text.push_str(key);
            self.text.push_str("=\"");
            escape(&mut self.text, value);
            self.text.push('"');
            open = ',';
        }
        if open == ',' {
            self.text.push('}');
        }
        let _ = writeln!(self.text, " {value}");
    }

    pub fn into_text(self) -> String {
        self.text
    }
}

fn escape(out: &mut String, text: &str) {
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '"' => out.push_str("\\\""),
            '\n' => out.push_str("\\n"),
            c => out.push(c),
        }
    }
}

/// What a histogram's buckets are.
#[derive(Debug)]
pub struct Shape {
    /// Upper ends, inclusive, in the unit that is observed.
    pub ends: &'static [u64],
    /// Observed units in one exported unit.
    pub scale: f64,
}

/// Counts observations by size. Any thread may observe.
#[derive(Debug)]
pub struct Histogram {
    shape: &'static Shape,
    /// One more than the shape has ends: the last is for what is above them all.
    buckets: Box<[AtomicU64]>,
    sum: AtomicU64,
}

impl Histogram {
    pub fn new(shape: &'static Shape) -> Self {
        let buckets = (0..=shape.ends.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram { shape, buckets, sum: AtomicU64::new(0) }
    }

    pub fn observe(&self, value: u64) {
        let at = self.shape.ends.partition_point(|end| *end < value);
        if let Some(bucket) = self.buckets.get(at) {
            bucket.fetch_add(1, Relaxed);
            self.sum.fetch_add(value, Relaxed);
        }
    }

    /// In microseconds.
    pub fn observe_time(&self, time: std::time::Duration) {
        self.observe(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    pub fn is_empty(&self) -> bool {
        self.buckets.iter().all(|b| b.load(Relaxed) == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static SHAPE: Shape = Shape { ends: &[1_000, 10_000], scale: 1e6 };

    #[test]
    fn a_histogram_counts_up_to_its_ends_and_above() {
        let histogram = Histogram::new(&SHAPE);
        for value in [0, 1_000, 1_001, 10_000, 10_001] {
            histogram.observe(value);
        }
        let mut page = Page::new();
        page.begin("x_seconds", "histogram", "X.");
        page.histogram(&[("a", "b")], &histogram);
        let expected = "# HELP x_seconds X.\n# TYPE x_seconds histogram\n\
            x_seconds_bucket{a=\"b\",le=\"0.001\"} 2\nx_seconds_bucket{a=\"b\",le=\"0.01\"} 4\n\
            x_seconds_bucket{a=\"b\",le=\"+Inf\"} 5\nx_seconds_sum{a=\"b\"} 0.022002\nx_seconds_count{a=\"b\"} 5\n";
        assert_eq!(page.into_text(), expected);
    }

    #[test]
    fn labels_cannot_break_out() {
        let mut page = Page::new();
        page.begin("x", "gauge", "X.");
        page.sample(&[("a", "a\"}\n\\")], 1);
        assert!(page.into_text().ends_with("x{a=\"a\\\"}\\n\\\\\"} 1\n"));
    }
}
