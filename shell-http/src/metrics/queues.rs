//! Depths, by queue. Names are clients': only so many are shown, the deepest, and the rest together.

use leasehold_core::job::record::{Class, Status};
use leasehold_core::request::QueueView;

use super::text::Page;
use crate::wire::view;

/// Queues that are shown by name.
const QUEUES: usize = 100;
/// What all others are called together. A queue of that name is one of them.
const OTHER: &str = "other";

/// What one label shows.
#[derive(Debug, Default, PartialEq)]
struct Row {
    name: String,
    /// By class and status.
    jobs: [[u64; Status::ALL.len()]; Class::ALL.len()],
    oldest_us: u64,
    paused: u64,
}

impl Row {
    fn add(&mut self, queue: &QueueView) {
        for (class, jobs) in Class::ALL.into_iter().zip(&mut self.jobs) {
            for (status, jobs) in Status::ALL.into_iter().zip(jobs) {
                *jobs += view::depth(queue, |c, s| c == class && s == status);
            }
        }
        let age = queue.oldest_due.map_or(0, |due| queue.at.saturating_sub(due));
        self.oldest_us = self.oldest_us.max(age);
        self.paused += u64::from(queue.paused);
    }
}

/// The deepest by name, the others in one, and how many those are.
fn rows(mut queues: Vec<QueueView>) -> (Vec<Row>, u64) {
    queues.sort_by_key(|q| std::cmp::Reverse(view::depth(q, |_, s| !s.is_terminal())));
    let mut rows: Vec<Row> = Vec::new();
    let mut other = Row { name: OTHER.into(), ..Row::default() };
    let mut omitted = 0;
    for queue in &queues {
        if rows.len() < QUEUES && queue.name != OTHER {
            let mut row = Row { name: queue.name.clone(), ..Row::default() };
            row.add(queue);
            rows.push(row);
        } else {
            other.add(queue);
            omitted += 1;
        }
    }
    if omitted > 0 {
        rows.push(other);
    }
    (rows, omitted)
}

/// `None`: the store cannot be read, and nothing is said.
pub(super) fn write(page: &mut Page, queues: Option<Vec<QueueView>>) {
    let known = queues.is_some();
    let (rows, omitted) = rows(queues.unwrap_or_default());
    page.begin("leasehold_queues_omitted", "gauge", "Queues that are shown together, as `other`.");
    if known {
        page.sample(&[], omitted);
    }
    page.begin("leasehold_queue_jobs", "gauge", "Jobs by queue, class and status.");
    for row in &rows {
        for (class, jobs) in Class::ALL.into_iter().zip(&row.jobs) {
            for (status, count) in Status::ALL.into_iter().zip(jobs) {
                if *count > 0 {
                    page.sample(&[("queue", &row.name), ("class", class.text()), ("status", status.text())], count);
                }
            }
        }
    }
    page.begin("leasehold_queue_oldest_seconds", "gauge", "How long the first job has been due.");
    for row in &rows {
        page.sample(&[("queue", &row.name)], row.oldest_us as f64 / 1e6);
    }
    page.begin("leasehold_queue_paused", "gauge", "1 while claims are stopped; of `other`, how many are.");
    for row in &rows {
        page.sample(&[("queue", &row.name)], row.paused);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(name: &str, depth: u64) -> QueueView {
        QueueView {
            name: name.into(),
            paused: true,
            reason: None,
            lease_ms: 1,
            depth: vec![(Class::Batch, Status::Queued, depth)],
            oldest_due: Some(1_000 - depth),
            at: 1_000,
        }
    }

    #[test]
    fn the_deepest_are_named_and_the_rest_is_one() {
        let mut queues: Vec<QueueView> = (0..150).map(|n| queue(&format!("q{n}"), n)).collect();
        queues.push(queue(OTHER, 500));
        let (rows, omitted) = rows(queues);
        assert_eq!((rows.len(), omitted), (101, 51));
        assert_eq!(rows[0].name, "q149");
        let other = rows.last().unwrap();
        let jobs: u64 = other.jobs.iter().flatten().sum();
        assert_eq!((other.name.as_str(), jobs), (OTHER, 500 + (0..50).sum::<u64>()), "a queue of that name is in it");
        assert_eq!((other.oldest_us, other.paused), (500, 51));
    }
}
