"""Small numbers for cache salts."""

from __future__ import annotations


class SaltBook:
    """Numbers salts from 1 while entries use them; 0 is nobody's. A number is reused when free."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}
        self._name: dict[int, str] = {}
        self._users: dict[int, int] = {}
        self._free: list[int] = []

    def acquire(self, salt: str) -> int:
        number = self._number.get(salt)
        if number is None:
            number = self._free.pop() if self._free else len(self._number) + 1
            self._number[salt] = number
            self._name[number] = salt
            self._users[number] = 0
        self._users[number] += 1
        return number

    def release(self, number: int) -> None:
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number]
            del self._number[self._name.pop(number)]
            self._free.append(number)

    def find(self, salt: str) -> int:
        """The number of a salt in use, or 0."""
        return self._number.get(salt, 0)

    def name(self, number: int) -> str:
        return self._name[number]

    def count(self, salt: str) -> int:
        """How many entries use a salt."""
        return self._users.get(self._number.get(salt, 0), 0)

    def some(self, after: int, limit: int) -> tuple[list[str], int]:
        """The salts in use among the ``limit`` numbers after ``after``, and the last number looked at;
        0 once there are no more."""
        end = after + limit
        names = [self._name[number] for number in range(after + 1, end + 1) if number in self._name]
        return names, end if end < len(self._number) + len(self._free) else 0

    def users(self) -> dict[int, int]:
        """How many entries use each number, for audits."""
        return dict(self._users)
