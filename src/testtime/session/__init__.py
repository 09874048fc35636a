"""The loop: a stream of images through one method, saved and resumed."""

from testtime.session.session import Session as Session
