//! What a store has said to be applied must stand there. Of what a transaction writes twice the last counts.

use std::collections::BTreeSet;

use leasehold_core::store::model::Model;
use leasehold_core::store::{ScoreAt, Taken, Txn, Write};

/// The first write of an applied transaction that was not done.
pub(super) fn undone(model: &Model, txn: &Txn, taken: &[Taken]) -> Option<String> {
    let (mut keys, mut members) = (BTreeSet::new(), BTreeSet::new());
    let has = |index, member| model.books().score(index, member);
    for write in txn.writes.iter().rev() {
        let wrong = match write {
            Write::Put { key, version, .. } => {
                let stands = model.records(key).next().is_some_and(|(k, s)| k == key && s.version == *version);
                keys.insert(key) && !stands
            }
            Write::Delete(key) => keys.insert(key) && model.records(key).next().is_some_and(|(k, _)| k == key),
            Write::Add { index, member, score, raise } => {
                let stands = match (has(index, member), score) {
                    (Some(found), ScoreAt::Number(wanted)) => found == *wanted || *raise && found > *wanted,
                    (Some(found), ScoreAt::Clock(after)) => {
                        let wanted = model.clock().saturating_add(*after).min(leasehold_core::store::SCORE_MAX);
                        found == wanted || *raise && found > wanted
                    }
                    (found, ScoreAt::Of(_)) => found.is_some(),
                    (None, _) => false,
                };
                members.insert((index, member)) && !stands
            }
            Write::Remove { index, member } => members.insert((index, member)) && has(index, member).is_some(),
            Write::Expire(..) | Write::Append { .. } | Write::Notify(_) => false,
        };
        if wrong {
            return Some(format!("{write:?}"));
        }
    }
    let take = txn.take.as_ref()?;
    let left =
        taken.iter().find(|t| take.from.get(t.source as usize).is_some_and(|s| has(&s.index, &t.member).is_some()));
    left.map(|t| format!("{} was taken and is still there", t.member))
}
