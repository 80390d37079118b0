//! All indexes of a store, by name.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::index::Index;
use super::port::{Clock, Place, Score, Slice, Span};
use crate::name::Name;

/// Every index that has a member. An empty index does not exist.
#[derive(Clone, Debug, Default)]
pub struct Books {
    indexes: BTreeMap<Name, Index>,
}

impl Books {
    pub fn get(&self, index: &Name) -> Option<&Index> {
        self.indexes.get(index)
    }

    pub fn score(&self, index: &Name, member: &Name) -> Option<Score> {
        self.get(index)?.score(member)
    }

    pub fn place(&self, index: &Name, member: &Name) -> Option<Place> {
        self.get(index)?.place(member)
    }

    pub fn count(&self, index: &Name, span: Span, clock: Clock) -> u64 {
        self.get(index).map_or(0, |i| i.count(span, clock))
    }

    pub fn slice(&self, slice: &Slice, clock: Clock) -> Vec<(Score, Name)> {
        let after = slice.after.as_ref().map(|(score, member)| (*score, &**member));
        self.get(&slice.index).map(|i| i.slice(after, slice.up_to, clock, slice.limit)).unwrap_or_default()
    }

    /// Enters, moves or (with `None`) removes a member; returns its score before.
    pub fn set(&mut self, index: &Name, member: &Name, score: Option<Score>) -> Option<Score> {
        match score {
            Some(score) => match self.indexes.get_mut(index) {
                Some(found) => found.set(member, score),
                None => {
                    let mut fresh = Index::default();
                    fresh.set(member, score);
                    self.indexes.insert(index.clone(), fresh);
                    None
                }
            },
            None => {
                let found = self.indexes.get_mut(index)?;
                let old = found.remove(member);
                if found.is_empty() {
                    self.indexes.remove(index);
                }
                old
            }
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = (&Name, &Index)> {
        self.indexes.iter()
    }
}
