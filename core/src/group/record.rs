//! What is stored of a group.

use alloc::string::String;

use crate::job::record::{Class, Policy, Trail};
use crate::store::{Clock, Version};

/// When a group stops before all its children have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum Mode {
    /// Never by itself: every child's outcome is collected.
    CollectAll,
    /// At the first dead child: those held are cancelled, those running are told to stop.
    FailFast,
}

impl Mode {
    pub const ALL: [Mode; 2] = [Mode::CollectAll, Mode::FailFast];

    pub fn text(self) -> &'static str {
        match self {
            Mode::CollectAll => "collect_all",
            Mode::FailFast => "fail_fast",
        }
    }

    pub fn parse(text: &str) -> Option<Mode> {
        Mode::ALL.into_iter().find(|m| m.text() == text)
    }
}

/// ```text
///             seal                       last child ends
/// open -----------------> running ------------------------> succeeded | partial | failed
///   \                        \                                (all | some | none succeeded)
///    \-- open time-out        \-- cancel, first dead child
///         \--------> stopped, reads running, until its children are through --> cancelled | failed
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum GroupStatus {
    Open,
    Running,
    /// Every child succeeded; also a group without children.
    Succeeded,
    /// Some children succeeded.
    Partial,
    /// None did, or the group was stopped by its first dead child.
    Failed,
    Cancelled,
}

impl GroupStatus {
    pub fn text(self) -> &'static str {
        match self {
            GroupStatus::Open => "open",
            GroupStatus::Running => "running",
            GroupStatus::Succeeded => "succeeded",
            GroupStatus::Partial => "partial",
            GroupStatus::Failed => "failed",
            GroupStatus::Cancelled => "cancelled",
        }
    }
}

/// Why a group was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum Stop {
    Cancelled,
    /// Never sealed.
    OpenTimeout,
    /// A child is dead, and the mode is [`Mode::FailFast`].
    ChildDead,
}

impl Stop {
    pub fn text(self) -> &'static str {
        match self {
            Stop::Cancelled => "cancelled",
            Stop::OpenTimeout => "open_timeout",
            Stop::ChildDead => "child_dead",
        }
    }
}

/// The record `group/{id}`. Where its children are is not in it: that is counted by indexes.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Group {
    pub tenant: String,
    pub queue: String,
    pub class: Class,
    pub mode: Mode,
    /// Children released at a time, at least 1; `None`: all.
    pub max_parallel: Option<u32>,
    /// What a child's own fields leave open; its retention is the group's.
    pub policy: Policy,
    pub traceparent: Option<String>,
    /// The idempotency key it is bound to, with the version of the key's record.
    pub key: Option<(String, Version)>,
    pub created: Clock,
    /// Stopped at this clock unless it is sealed before.
    pub open_until: Option<Clock>,
    /// Children created so far: their indexes are `0..filled`.
    pub filled: u32,
    pub sealed: bool,
    pub stopped: Option<Stop>,
    pub end: Option<(GroupStatus, Clock)>,
    pub trail: Trail,
}

impl Group {
    pub fn status(&self) -> GroupStatus {
        match self.end {
            Some((status, _)) => status,
            None if self.sealed || self.stopped.is_some() => GroupStatus::Running,
            None => GroupStatus::Open,
        }
    }

    /// The record that replaces one of that version.
    pub fn after(&self, version: Version) -> Group {
        Group { trail: self.trail.after(version), ..self.clone() }
    }
}
