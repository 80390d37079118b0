//! Long polls that wait, and who is woken by what.
//!
//! A notification of a queue wakes the first who waits for it: if that claim was filled to its
//! maximum there may be more, and the next is woken. So one submit costs one claim, not one for
//! every waiting worker.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::ops::Bound;

use super::Now;
use super::task::TaskId;
use crate::name::Name;

/// The order of those who wait for one topic: as a store orders the members of an index.
pub(crate) type Turn = (u64, Name);

#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Polls {
    waiting: BTreeMap<TaskId, (Vec<Name>, Now, Turn)>,
    topics: BTreeMap<Name, BTreeSet<(Turn, TaskId)>>,
    ends: BTreeSet<(Now, TaskId)>,
    /// Gives each wait its turn.
    order: u64,
}

impl Polls {
    /// Waits until a topic is notified or `end` has come. Without a turn of its own it comes after all who
    /// wait already.
    pub fn wait(&mut self, task: TaskId, topics: Vec<Name>, turn: Option<Turn>, end: Now) {
        self.order += 1;
        let turn = turn.unwrap_or_else(|| (self.order, Name::default()));
        for topic in &topics {
            self.topics.entry(topic.clone()).or_default().insert((turn.clone(), task));
        }
        self.ends.insert((end, task));
        self.waiting.insert(task, (topics, end, turn));
    }

    pub fn remove(&mut self, task: TaskId) -> bool {
        let Some((topics, end, turn)) = self.waiting.remove(&task) else { return false };
        self.ends.remove(&(end, task));
        for topic in topics {
            if let Some(waiters) = self.topics.get_mut(&topic) {
                waiters.remove(&(turn.clone(), task));
                if waiters.is_empty() {
                    self.topics.remove(&topic);
                }
            }
        }
        true
    }

    /// Whose turn it is on the topic.
    pub fn first(&self, topic: &Name) -> Option<TaskId> {
        self.topics.get(topic)?.first().map(|w| w.1)
    }

    /// The first `n` whose turn it is on the topic.
    pub fn line(&self, topic: &Name, n: usize) -> Vec<TaskId> {
        self.topics.get(topic).map(|w| w.iter().take(n).map(|w| w.1).collect()).unwrap_or_default()
    }

    pub fn all(&self, topic: &Name) -> Vec<TaskId> {
        self.topics.get(topic).map(|w| w.iter().map(|w| w.1).collect()).unwrap_or_default()
    }

    /// The first waiters of the next `n` topics after one: asked again once in a while, since a
    /// notification may be lost. And the last of these topics, unless it was the last of all.
    pub fn scouts(&self, after: Option<&Name>, n: usize) -> (Vec<TaskId>, Option<Name>) {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut scouts = BTreeSet::new();
        let mut last = None;
        let mut topics = self.topics.range::<Name, _>((from, Bound::Unbounded));
        for (topic, waiters) in topics.by_ref().take(n) {
            scouts.extend(waiters.first().map(|w| w.1));
            last = Some(topic.clone());
        }
        let more = topics.next().is_some();
        (scouts.into_iter().collect(), last.filter(|_| more))
    }

    /// Those who wait no longer than this.
    pub fn ended(&self, now: Now) -> Vec<TaskId> {
        self.ends.iter().take_while(|e| e.0 <= now).map(|e| e.1).collect()
    }

    pub fn everyone(&self) -> Vec<TaskId> {
        self.waiting.keys().copied().collect()
    }

    pub fn next(&self) -> Option<Now> {
        self.ends.first().map(|e| e.0)
    }

    pub fn len(&self) -> usize {
        self.waiting.len()
    }
}
