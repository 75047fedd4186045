from tests.core.harness import Driver, make_request, make_spec


def test_one_request_gets_its_tokens_and_one_end():
    driver = Driver(make_spec())
    driver.add(make_request(1, 10, max_tokens=20))
    driver.run()
    assert len(driver.tokens[1]) == 20
    assert driver.finished[1].reason == "length"
    driver.assert_at_rest()
