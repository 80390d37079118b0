//! Pools and slots: what is sent, and what is answered.

use bytes::Bytes;
use leasehold_core::Request;
use leasehold_core::job::record::Class;
use leasehold_core::request::{Acquire, HolderView, PoolView, SetPool, SlotId, SlotOf};
use leasehold_core::store::Clock;

use super::fields::{self, Value};
use super::json::{self, Object};
use super::submit::{TENANT, class};
use crate::problem::Problem;

pub const SET_POOL: &[&str] = &["total", "batch_max", "lease_ms"];
pub const ACQUIRE: &[&str] = &["class", "cost", "holder", "lease_ms", "wait_ms", "slot_id"];

/// `{total?, batch_max?, lease_ms?}`.
pub fn set(pool: String, body: &Bytes) -> Result<Request, Problem> {
    let mut asked = SetPool { tenant: TENANT.into(), pool, total: None, batch_max: None, lease_ms: None };
    for (name, raw) in fields::object(body)? {
        let value = Value::new(fields::known(&name, SET_POOL)?, raw, body);
        if value.is_null() {
            continue;
        }
        let number = Some(value.u64()?);
        match value.field {
            "total" => asked.total = number,
            "batch_max" => asked.batch_max = number,
            _ => asked.lease_ms = number,
        }
    }
    Ok(Request::SetPool(asked))
}

/// `{class?, cost?, holder?, lease_ms?, wait_ms?, slot_id?}`.
pub fn acquire(pool: String, body: &Bytes) -> Result<Request, Problem> {
    let mut asked = Acquire {
        tenant: TENANT.into(),
        pool,
        slot: None,
        class: Class::System,
        cost: 1,
        holder: None,
        lease_ms: None,
        wait_ms: 0,
    };
    for (name, raw) in fields::optional_object(body)? {
        let value = Value::new(fields::known(&name, ACQUIRE)?, raw, body);
        match value.field {
            _ if value.is_null() => {}
            "class" => asked.class = class(value)?,
            "cost" => asked.cost = value.u32()?,
            "holder" => asked.holder = Some(value.string()?),
            "lease_ms" => asked.lease_ms = Some(value.u64()?),
            "wait_ms" => asked.wait_ms = value.u64()?,
            _ => asked.slot = Some(value.string()?),
        }
    }
    Ok(Request::Acquire(Box::new(asked)))
}

pub fn pools(out: &mut Vec<u8>, pools: &[PoolView]) {
    let mut object = Object::new(out);
    json::array(object.key("pools"), pools, |out, pool| view(out, pool, false));
    object.end();
}

/// One pool; `holders`: with those who hold it.
pub fn view(out: &mut Vec<u8>, pool: &PoolView, holders: bool) {
    let mut object = Object::new(out);
    object.str("name", &pool.name);
    object.num("total", pool.total.into());
    object.num("batch_max", pool.batch_max.unwrap_or(pool.total).into());
    object.num("lease_ms", pool.lease_ms);
    object.num("in_use", pool.in_use);
    object.num("batch_in_use", pool.batch_in_use);
    let mut waiting = Object::new(object.key("waiting"));
    for (class, n) in &pool.waiting {
        waiting.num(class.text(), *n);
    }
    waiting.end();
    if holders {
        json::array(object.key("holders"), &pool.holders, holder);
    }
    object.end();
}

fn holder(out: &mut Vec<u8>, held: &HolderView) {
    let mut object = Object::new(out);
    match &held.of {
        SlotOf::Caller(id) => object.str("id", &id.to_string()),
        SlotOf::Job(job) => object.str("job", &job.to_string()),
    }
    if let Some(holder) = &held.holder {
        object.str("holder", holder);
    }
    object.str("class", held.class.text());
    object.num("cost", held.cost.into());
    object.time("expires_at", held.expires_at);
    object.end();
}

/// `declared`: granted by the server itself, since the store cannot be reached.
pub fn slot(out: &mut Vec<u8>, id: &SlotId, expires_at: Clock, declared: bool) {
    let mut object = Object::new(out);
    object.str("id", &id.to_string());
    object.time("expires_at", expires_at);
    if declared {
        object.bool("fail_open", true);
    }
    object.end();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_asked_for() {
        let read = |text: &'static str| acquire("gpu".into(), &Bytes::from_static(text.as_bytes()));
        let Ok(Request::Acquire(asked)) =
            read(r#"{"class":"batch","cost":3,"holder":"h","lease_ms":100,"wait_ms":7,"slot_id":"s"}"#)
        else {
            panic!()
        };
        assert_eq!((asked.class, asked.cost, asked.wait_ms), (Class::Batch, 3, 7));
        assert_eq!((asked.slot.as_deref(), asked.holder.as_deref(), asked.lease_ms), (Some("s"), Some("h"), Some(100)));
        for nothing in ["", " ", "{}", r#"{"class":null,"slot_id":null}"#] {
            assert!(matches!(read(nothing), Ok(Request::Acquire(a)) if a.slot.is_none() && a.cost == 1), "{nothing}");
        }
        for bad in [r#"{"class":"first"}"#, r#"{"cost":-1}"#, r#"{"slot_id":7}"#, r#"{"slot":"s"}"#, "[]"] {
            assert!(matches!(read(bad), Err(Problem::Field { .. })), "{bad}");
        }
    }
}
