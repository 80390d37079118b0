//! One ordered index in memory: members by (score, member), with sizes and ranks in O(log n).
//!
//! A B+ tree whose inner nodes count what is below them. Nodes that grow past [`FANOUT`] are split;
//! a node that has become empty is dropped and a small one is joined with its neighbour.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::port::{Clock, Place, Score, Span, UpTo};
use crate::name::Name;

const FANOUT: usize = 64;
const SMALL: usize = FANOUT / 4;

type Key = (Score, Name);

/// Members ordered by score, then member.
#[derive(Clone, Debug, Default)]
pub struct Index {
    scores: BTreeMap<Name, Score>,
    order: Node,
}

#[derive(Clone, Debug)]
enum Node {
    Leaf(Vec<Key>),
    Inner(Vec<Child>),
}

#[derive(Clone, Debug)]
struct Child {
    /// At or below every key in the node, above every key of the child before. Not looked at for
    /// the first child.
    floor: Key,
    count: usize,
    node: Box<Node>,
}

impl Index {
    pub fn len(&self) -> usize {
        self.scores.len()
    }

    pub fn is_empty(&self) -> bool {
        self.scores.is_empty()
    }

    pub fn score(&self, member: &[u8]) -> Option<Score> {
        self.scores.get(member).copied()
    }

    pub fn place(&self, member: &Name) -> Option<Place> {
        let score = self.score(member)?;
        Some(Place { score, rank: self.order.rank(score, member) as u64 })
    }

    /// Members with a score at or before the clock.
    pub fn due(&self, clock: Clock) -> usize {
        self.order.rank(clock.saturating_add(1), &[])
    }

    pub fn count(&self, span: Span, clock: Clock) -> u64 {
        match span {
            Span::All => self.len() as u64,
            Span::Live => (self.len() - self.due(clock)) as u64,
        }
    }

    pub fn first(&self) -> Option<&Key> {
        let mut node = &self.order;
        loop {
            match node {
                Node::Leaf(keys) => return keys.first(),
                Node::Inner(children) => node = &children.first()?.node,
            }
        }
    }

    /// Enters or moves a member; returns its score before.
    pub fn set(&mut self, member: &Name, score: Score) -> Option<Score> {
        let old = match self.scores.get_mut(member) {
            Some(old) => {
                let before = core::mem::replace(old, score);
                if before == score {
                    return Some(before);
                }
                self.order.remove(before, member);
                Some(before)
            }
            None => {
                self.scores.insert(member.clone(), score);
                None
            }
        };
        self.order.insert_root((score, member.clone()));
        old
    }

    /// Takes a member out; returns its score.
    pub fn remove(&mut self, member: &[u8]) -> Option<Score> {
        let score = self.scores.remove(member)?;
        self.order.remove(score, member);
        self.order.shrink_root();
        Some(score)
    }

    /// The members after `after` (exclusive) up to `up_to` (inclusive), at most `limit`.
    pub fn slice(&self, after: Option<(Score, &[u8])>, up_to: UpTo, clock: Clock, limit: usize) -> Vec<Key> {
        let end = match up_to {
            UpTo::End => Score::MAX,
            UpTo::Score(score) => score,
            UpTo::Clock => clock,
        };
        let mut out = Vec::new();
        if limit > 0 {
            self.order.collect(after, end, limit, &mut out);
        }
        out
    }

    pub fn iter(&self) -> impl Iterator<Item = (&Name, Score)> {
        self.scores.iter().map(|(m, s)| (m, *s))
    }

    /// Whether the two halves agree; for tests.
    #[cfg(test)]
    fn check(&self) {
        let keys = self.slice(None, UpTo::End, 0, usize::MAX);
        assert!(keys.windows(2).all(|w| w[0] < w[1]));
        let mut from_scores: Vec<Key> = self.scores.iter().map(|(m, s)| (*s, m.clone())).collect();
        from_scores.sort();
        assert_eq!(keys, from_scores);
        assert_eq!(self.order.len(), keys.len());
    }
}

impl Default for Node {
    fn default() -> Self {
        Node::Leaf(Vec::new())
    }
}

/// Which child holds a key: the last whose floor is not above it.
fn child_of(children: &[Child], score: Score, member: &[u8]) -> usize {
    children.partition_point(|c| (c.floor.0, &*c.floor.1) <= (score, member)).saturating_sub(1)
}

impl Node {
    fn len(&self) -> usize {
        match self {
            Node::Leaf(keys) => keys.len(),
            Node::Inner(children) => children.iter().map(|c| c.count).sum(),
        }
    }

    fn width(&self) -> usize {
        match self {
            Node::Leaf(keys) => keys.len(),
            Node::Inner(children) => children.len(),
        }
    }

    /// Keys below (score, member).
    fn rank(&self, score: Score, member: &[u8]) -> usize {
        match self {
            Node::Leaf(keys) => keys.partition_point(|k| (k.0, &*k.1) < (score, member)),
            Node::Inner(children) => {
                let at = child_of(children, score, member);
                let before: usize = children[..at].iter().map(|c| c.count).sum();
                before + children.get(at).map_or(0, |c| c.node.rank(score, member))
            }
        }
    }

    fn insert_root(&mut self, key: Key) {
        if let Some(right) = self.insert(key) {
            let left = core::mem::take(self);
            let floor = (0, Name::default());
            let left = Child { floor, count: left.len(), node: Box::new(left) };
            *self = Node::Inner(alloc::vec![left, right]);
        }
    }

    /// Inserts; returns the new right neighbour if the node had to be split.
    fn insert(&mut self, key: Key) -> Option<Child> {
        match self {
            Node::Leaf(keys) => {
                let at = keys.partition_point(|k| *k < key);
                keys.insert(at, key);
                if keys.len() <= FANOUT {
                    return None;
                }
                // Most inserts come at the end: leave the left node full then.
                let cut = if at + 1 == keys.len() { FANOUT - 1 } else { FANOUT / 2 };
                let right = split(keys, cut);
                let floor = right.first().cloned().unwrap_or_default();
                Some(Child { floor, count: right.len(), node: Box::new(Node::Leaf(right)) })
            }
            Node::Inner(children) => {
                let at = child_of(children, key.0, &key.1);
                let child = children.get_mut(at)?;
                child.count += 1;
                if let Some(right) = child.node.insert(key) {
                    child.count -= right.count;
                    children.insert(at + 1, right);
                }
                if children.len() <= FANOUT {
                    return None;
                }
                let cut = if at + 2 >= children.len() { FANOUT - 1 } else { FANOUT / 2 };
                let right = split(children, cut);
                let floor = right.first().map(|c| c.floor.clone()).unwrap_or_default();
                let count = right.iter().map(|c| c.count).sum();
                Some(Child { floor, count, node: Box::new(Node::Inner(right)) })
            }
        }
    }

    fn remove(&mut self, score: Score, member: &[u8]) -> bool {
        match self {
            Node::Leaf(keys) => {
                let at = keys.partition_point(|k| (k.0, &*k.1) < (score, member));
                let found = keys.get(at).is_some_and(|k| k.0 == score && &*k.1 == member);
                if found {
                    keys.remove(at);
                }
                found
            }
            Node::Inner(children) => {
                let at = child_of(children, score, member);
                let Some(child) = children.get_mut(at) else { return false };
                if !child.node.remove(score, member) {
                    return false;
                }
                child.count -= 1;
                if child.count == 0 {
                    children.remove(at);
                } else if child.node.width() < SMALL {
                    join(children, at);
                }
                true
            }
        }
    }

    fn shrink_root(&mut self) {
        loop {
            match self {
                Node::Inner(children) if children.len() <= 1 => {
                    *self = children.pop().map(|c| *c.node).unwrap_or_default();
                }
                _ => return,
            }
        }
    }

    fn collect(&self, after: Option<(Score, &[u8])>, end: Score, limit: usize, out: &mut Vec<Key>) {
        match self {
            Node::Leaf(keys) => {
                let from = after.map_or(0, |(s, m)| keys.partition_point(|k| (k.0, &*k.1) <= (s, m)));
                for key in &keys[from..] {
                    if key.0 > end || out.len() >= limit {
                        return;
                    }
                    out.push(key.clone());
                }
            }
            Node::Inner(children) => {
                let from = after.map_or(0, |(s, m)| child_of(children, s, m));
                for (i, child) in children.iter().enumerate().skip(from) {
                    if out.len() >= limit || (i > 0 && child.floor.0 > end) {
                        return;
                    }
                    child.node.collect(after, end, limit, out);
                }
            }
        }
    }
}

/// Splits a node's contents, with room for a full node in either part and no more: grown by
/// doubling, every node would take twice its memory.
fn split<T>(contents: &mut Vec<T>, cut: usize) -> Vec<T> {
    let mut right = contents.split_off(cut);
    contents.shrink_to(FANOUT + 1);
    right.reserve_exact(FANOUT + 1 - right.len());
    right
}

/// Joins a small child with a neighbour of the same height if both fit in one node.
fn join(children: &mut Vec<Child>, at: usize) {
    let left = if at > 0 { at - 1 } else { at };
    let fits =
        children.get(left).zip(children.get(left + 1)).is_some_and(|(a, b)| a.node.width() + b.node.width() <= FANOUT);
    if !fits {
        return;
    }
    let right = children.remove(left + 1);
    let Some(into) = children.get_mut(left) else { return };
    into.count += right.count;
    match (&mut *into.node, *right.node) {
        (Node::Leaf(a), Node::Leaf(mut b)) => a.append(&mut b),
        (Node::Inner(a), Node::Inner(mut b)) => {
            // Its floor was never looked at as a first child; as a later one it is.
            if let Some(first) = b.first_mut() {
                first.floor = right.floor;
            }
            a.append(&mut b);
        }
        _ => debug_assert!(false, "all leaves are at the same depth"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn name(n: u16) -> Name {
        Name::from(alloc::format!("{n:04}"))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn agrees_with_a_sorted_list(ops in proptest::collection::vec((0u16..400, 0u64..50, 0u8..4), 1..1500)) {
            let mut index = Index::default();
            let mut naive: Vec<Key> = Vec::new();
            for (n, score, op) in ops {
                let member = name(n);
                let before = naive.iter().position(|k| k.1 == member);
                let old = before.map(|i| naive.remove(i).0);
                if op == 0 {
                    prop_assert_eq!(index.remove(&member), old);
                } else {
                    prop_assert_eq!(index.set(&member, score), old);
                    naive.push((score, member.clone()));
                    naive.sort();
                }
                let rank = naive.iter().position(|k| k.1 == member);
                prop_assert_eq!(index.place(&member).map(|p| p.rank as usize), rank);
                prop_assert_eq!(index.due(score), naive.iter().filter(|k| k.0 <= score).count());
                let after = (score, name(n / 2));
                let expect: Vec<Key> =
                    naive.iter().filter(|k| **k > after && k.0 <= 40).take(7).cloned().collect();
                prop_assert_eq!(index.slice(Some((after.0, &after.1)), UpTo::Score(40), 0, 7), expect);
                prop_assert_eq!(index.first(), naive.first());
            }
            index.check();
        }
    }

    #[test]
    fn a_queue_that_fills_and_drains_leaves_nothing() {
        let mut index = Index::default();
        for n in 0..50_000u32 {
            index.set(&Name::from(n.to_be_bytes().to_vec()), n.into());
        }
        index.check();
        for n in (0..50_000u32).step_by(2).chain((1..50_000).step_by(2)) {
            assert_eq!(index.remove(&n.to_be_bytes()), Some(n.into()));
        }
        index.check();
        assert!(index.is_empty() && matches!(&index.order, Node::Leaf(k) if k.is_empty()));
    }
}
