//! What requests may contain: small checks with answers that say what to mend.

use alloc::format;
use alloc::string::String;

use crate::failure::Failure;
use crate::limits;
use crate::opaque::{Content, Form};

pub(crate) fn invalid(field: &'static str, detail: String) -> Failure {
    Failure::Invalid { field, detail }
}

/// Names of queues, tenants, workers, claims.
pub(crate) fn name(field: &'static str, value: &str) -> Result<(), Failure> {
    text(field, value, limits::NAME_BYTES)
}

/// Not empty, not longer than `most` bytes, no control characters.
pub(crate) fn text(field: &'static str, value: &str, most: usize) -> Result<(), Failure> {
    if value.is_empty() {
        Err(invalid(field, "must not be empty".into()))
    } else if value.len() > most {
        Err(invalid(field, format!("is {} bytes long, at most {most} are allowed", value.len())))
    } else if value.chars().any(char::is_control) {
        Err(invalid(field, "must not contain control characters".into()))
    } else {
        Ok(())
    }
}

pub(crate) fn within(field: &'static str, value: Option<u64>, least: u64, most: u64) -> Result<(), Failure> {
    match value {
        Some(v) if v < least || v > most => Err(invalid(field, format!("is {v}, must be from {least} to {most}"))),
        _ => Ok(()),
    }
}

pub(crate) fn content(field: &'static str, content: Option<&Content>) -> Result<(), Failure> {
    let Some(content) = content else { return Ok(()) };
    if content.data.len() > limits::PAYLOAD_BYTES {
        let (len, most) = (content.data.len(), limits::PAYLOAD_BYTES);
        return Err(invalid(field, format!("is {len} bytes long, at most {most} are kept")));
    }
    match &content.form {
        Form::Json => Ok(()),
        Form::Binary { content_type } => text("content_type", content_type, limits::CONTENT_TYPE_BYTES),
    }
}
