//! One value of the YAML files, asked for by type; what it should have been is part of every answer.

use std::{fs, ops::RangeInclusive, path::PathBuf, time::Duration};

use serde_json::Value;

use super::{Secret, duration, error::ConfigError};

/// A value, or the place where one could be. `null` counts as absent.
pub(super) struct Node<'a> {
    file: String,
    key: String,
    value: Option<&'a Value>,
}

impl<'a> Node<'a> {
    pub(super) fn new(file: String, key: impl Into<String>, value: Option<&'a Value>) -> Self {
        Self {
            file,
            key: key.into(),
            value: value.filter(|value| !value.is_null()),
        }
    }

    /// An error about this value; `problem` goes on with the sentence that the key begins, and holds no secret.
    pub(super) fn error(&self, problem: impl std::fmt::Display, remedy: impl std::fmt::Display) -> ConfigError {
        ConfigError::at_key(&self.file, &self.key, problem, remedy)
    }

    /// The error of a value that must be there and is not.
    pub(super) fn missing(&self, remedy: &str) -> ConfigError {
        self.error("is missing", remedy)
    }

    /// A sentence about this value, if there is one that is not empty.
    pub(super) fn warning(&self, what: &str) -> Option<String> {
        let is_empty = self.value?.as_array().is_some_and(Vec::is_empty);
        (!is_empty).then(|| format!("{}: `{}`: {what}", self.file, self.key))
    }

    /// Whether there is a value.
    pub(super) fn is_present(&self) -> bool {
        self.value.is_some()
    }

    /// The value under `key` of this map.
    pub(super) fn get(&self, key: &str) -> Result<Node<'a>, ConfigError> {
        let value = match self.value {
            None => None,
            Some(Value::Object(map)) => map.get(key),
            Some(_) => return Err(self.wrong_type("a map (`key: value` lines)")),
        };
        Ok(Node::new(self.file.clone(), format!("{}.{key}", self.key), value))
    }

    /// The map's entries.
    pub(super) fn entries(&self) -> Result<Vec<(&'a str, Node<'a>)>, ConfigError> {
        let node = |key: &str, value| Node::new(self.file.clone(), format!("{}.{key}", self.key), Some(value));
        match self.value {
            None => Ok(Vec::new()),
            Some(Value::Object(map)) => Ok(map
                .iter()
                .map(|(key, value)| (key.as_str(), node(key, value)))
                .collect()),
            Some(_) => Err(self.wrong_type("a map (`key: value` lines)")),
        }
    }

    /// The list's texts.
    pub(super) fn texts(&self) -> Result<Option<Vec<String>>, ConfigError> {
        let items = match self.value {
            None => return Ok(None),
            Some(Value::Array(items)) => items,
            Some(_) => return Err(self.wrong_type("a list (`[one, two]`)")),
        };
        let text = |(index, item)| {
            let node = Node::new(self.file.clone(), format!("{}[{index}]", self.key), Some(item));
            node.text()?
                .ok_or_else(|| node.missing("Fill in the entry or remove it"))
        };
        items.iter().enumerate().map(text).collect::<Result<_, _>>().map(Some)
    }

    /// A text, or a list of texts.
    pub(super) fn one_or_more(&self) -> Result<Option<Vec<String>>, ConfigError> {
        match self.value {
            Some(Value::String(text)) => Ok(Some(vec![text.clone()])),
            _ => self.texts(),
        }
    }

    /// A text, or a number as it is written.
    pub(super) fn literal(&self) -> Result<Option<String>, ConfigError> {
        match self.value {
            Some(Value::Number(number)) => Ok(Some(number.to_string())),
            _ => self.text(),
        }
    }

    /// A text. An integer counts as its decimal digits: nobody quotes a password of digits.
    pub(super) fn text(&self) -> Result<Option<String>, ConfigError> {
        match self.value {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(Value::Number(number)) if !number.is_f64() => Ok(Some(number.to_string())),
            Some(_) => Err(self.wrong_type("a text (put it in quotes)")),
        }
    }

    /// A text that is not to be shown.
    pub(super) fn secret(&self) -> Result<Option<Secret>, ConfigError> {
        Ok(self.text()?.map(Secret))
    }

    /// A truth value; `yes` and its like are booleans to `PyYAML`.
    pub(super) fn flag(&self) -> Result<Option<bool>, ConfigError> {
        match self.value {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(Value::String(word)) if ["yes", "Yes", "YES", "on", "On", "ON"].contains(&word.as_str()) => {
                Ok(Some(true))
            }
            Some(Value::String(word)) if ["no", "No", "NO", "off", "Off", "OFF"].contains(&word.as_str()) => {
                Ok(Some(false))
            }
            Some(_) => Err(self.wrong_type("`true` or `false`")),
        }
    }

    /// An integer within `range`, also as a text of digits.
    pub(super) fn integer<T>(&self, range: RangeInclusive<T>) -> Result<Option<T>, ConfigError>
    where
        T: TryFrom<i64> + PartialOrd + std::fmt::Display,
    {
        let number = match self.value {
            None => return Ok(None),
            Some(Value::Number(number)) if !number.is_f64() => number.as_i64(),
            Some(Value::String(text)) if text.bytes().all(|b| b.is_ascii_digit()) => text.parse().ok(),
            Some(_) => return Err(self.wrong_type("an integer")),
        };
        match number.and_then(|number| T::try_from(number).ok()) {
            Some(number) if range.contains(&number) => Ok(Some(number)),
            _ => Err(self.error(
                "is out of range",
                format!("Give an integer from {} to {}", range.start(), range.end()),
            )),
        }
    }

    /// A number that need not be an integer.
    pub(super) fn number(&self) -> Result<Option<f64>, ConfigError> {
        match self.value {
            None => Ok(None),
            Some(Value::Number(number)) => Ok(number.as_f64()),
            Some(_) => Err(self.wrong_type("a number")),
        }
    }

    /// A length of time, as Synapse writes it.
    pub(super) fn duration(&self) -> Result<Option<Duration>, ConfigError> {
        let duration = match self.value {
            None => return Ok(None),
            Some(Value::Number(number)) if !number.is_f64() => duration::parse(&number.to_string()),
            Some(Value::String(text)) => duration::parse(text),
            Some(_) => None,
        };
        match duration {
            Some(duration) => Ok(Some(duration)),
            None => Err(self.error("is not a length of time", duration::GRAMMAR)),
        }
    }

    /// The path of a file that can be opened.
    pub(super) fn readable_path(&self) -> Result<Option<PathBuf>, ConfigError> {
        let Some(path) = self.text()?.map(PathBuf::from) else {
            return Ok(None);
        };
        match fs::File::open(&path) {
            Ok(_) => Ok(Some(path)),
            Err(e) => Err(self.unreadable(&path, &e)),
        }
    }

    /// The paths of a certificate (this value) and its key, both or neither.
    pub(super) fn pair_of_files(&self, key: &Node<'_>) -> Result<Option<(PathBuf, PathBuf)>, ConfigError> {
        match (self.readable_path()?, key.readable_path()?) {
            (Some(certificate), Some(key)) => Ok(Some((certificate, key))),
            (None, None) => Ok(None),
            (Some(_), None) => Err(key.missing("Name the private key of the certificate")),
            (None, Some(_)) => Err(self.missing("Name the certificate of the private key")),
        }
    }

    /// What stands in the file that this value is the path of.
    pub(super) fn file_content(&self) -> Result<Option<String>, ConfigError> {
        let Some(path) = self.text()?.map(PathBuf::from) else {
            return Ok(None);
        };
        fs::read_to_string(&path)
            .map(Some)
            .map_err(|e| self.unreadable(&path, &e))
    }

    /// An error about the file at `path`, which this key names.
    pub(super) fn unreadable(&self, path: &std::path::Path, error: &std::io::Error) -> ConfigError {
        self.error(
            format!("names {}, which cannot be read: {error}", path.display()),
            "Check the path, and that the user Burdock runs as may read the file",
        )
    }

    fn wrong_type(&self, wanted: &str) -> ConfigError {
        let found = match self.value {
            None | Some(Value::Null) => "nothing",
            Some(Value::Bool(_)) => "a truth value",
            Some(Value::Number(_)) => "a number",
            Some(Value::String(_)) => "a text",
            Some(Value::Array(_)) => "a list",
            Some(Value::Object(_)) => "a map",
        };
        self.error(format!("is {found}"), format!("Make it {wanted}"))
    }
}
